"""PyTorch's scaled_dot_product_attention falls back to separate products.

Costs        The S x S scores are written to memory, as if attention were written out by hand; only the line looks fused.
Evidence     The softmax that only torch's fallback uses (aten._safe_softmax) in a step, and dropout beside it: no fused kernel
             for the CPU takes dropout. Trial: the same attention with dropout_p=0, forward and backward.
Levers       memory.fused-attention
False alarm  Short sequences, where the fused kernel gains nothing: the trial says so. Leaving dropout out of the weights is
             another experiment, so it is a note and no gain; so are other reasons (head size, dtype, a mask with a gradient).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from flatout.core.parts import rule
from flatout.core.records.evidence import Evidence, Operator
from flatout.core.records.finding import Note
from flatout.core.records.trial import TimeAttentionCall
from flatout.machine.cost.accounting import (
    group_by,
    has_backward,
    milliseconds,
    operator_seconds,
    remaining_fraction,
    result_of,
    rows_with_shape,
)
from flatout.machine.cost.suspects import proposing

_DROPOUT = ("aten.bernoulli_", "aten.native_dropout", "aten.bernoulli")
_USUAL_DROPOUT = 0.1
_WORTH_A_TRIAL = 0.05
_SHORTEST = 32
_NO_FASTER = 0.95
"""Of the time left without dropout, beyond which nothing is worth telling: the noise of a trial is of that size."""


class _Fallback(NamedTuple):
    rows: tuple[int, ...]
    """Operators of the line, forward and backward, that touch scores of this size."""
    trial: TimeAttentionCall
    softmax: Operator
    has_dropout: bool


def note(evidence: Evidence) -> Iterator[Note]:
    """Yield a note for each line that falls back."""
    for fallback in _with_dropout(evidence):
        cost_s, result = operator_seconds(evidence, fallback.rows), result_of(evidence, fallback.trial)
        remaining = remaining_fraction(result) if result is not None else 0.0
        if cost_s <= _WORTH_A_TRIAL * evidence.steps.step_s or remaining > _NO_FASTER:
            continue
        tried = f" it takes {remaining:.0%} of that (tried), but" if result is not None else ""
        yield Note(
            where=evidence.source_of(fallback.softmax.source),
            text="with dropout on its weights attention has no fused kernel here and writes scores of "
            f"{'x'.join(map(str, fallback.softmax.outputs[0].shape))}, {milliseconds(cost_s)} a step; with dropout_p=0.0{tried} "
            "the regularisation is another one, and so the experiment",
        )
    for fallback in _fallbacks(evidence):
        if not fallback.has_dropout:
            yield Note(
                where=evidence.source_of(fallback.softmax.source),
                text="scaled_dot_product_attention runs as separate products here; head size, dtype, a mask that needs a "
                "gradient, or tensors that are not (batch, heads, tokens, size) keep it from a fused kernel",
            )


def _with_dropout(evidence: Evidence) -> list[_Fallback]:
    return [f for f in _fallbacks(evidence) if f.has_dropout]


def _fallbacks(evidence: Evidence) -> Iterator[_Fallback]:
    """The largest fallback softmax of each line, with what surrounds it."""
    found = [
        o
        for o in evidence.operators
        if o.op == "aten._safe_softmax"
        and o.phase != "backward"
        and o.source >= 0
        and len(o.outputs[0].shape) == 4
        and min(o.outputs[0].shape[-2:]) >= _SHORTEST
    ]
    for source, operators in group_by(found, lambda o: o.source).items():
        softmax = max(operators, key=lambda o: o.outputs[0].num_elements)
        queries, keys = softmax.outputs[0].shape[-2:]
        rows = rows_with_shape(evidence, {source}, {(queries, keys), (keys, queries)})
        has_dropout = any(evidence.operators[i].op in _DROPOUT for i in rows)
        yield _Fallback(rows, _trial_of(evidence, rows, softmax), softmax, has_dropout)


def _trial_of(evidence: Evidence, rows: tuple[int, ...], softmax: Operator) -> TimeAttentionCall:
    batch, heads, q_len, kv_len = softmax.outputs[0].shape
    products = [evidence.operators[i] for i in rows if evidence.operators[i].op in ("aten.bmm", "aten.baddbmm")]
    scores = [o for o in products if o.outputs[0].shape[-2:] == (q_len, kv_len) and o.phase != "backward"]
    added = [evidence.operators[i] for i in rows if evidence.operators[i].op in ("aten.add", "aten.add_")]
    return TimeAttentionCall(
        batch=batch,
        heads=heads,
        q_len=q_len,
        kv_len=kv_len,
        head_dim=scores[0].inputs[-2].shape[-1] if scores else 64,
        dtype=softmax.outputs[0].dtype,
        masked=any(o.phase != "backward" for o in added),
        dropout=_USUAL_DROPOUT,
        backward=has_backward(evidence, rows),
        cure="no-dropout",
    )


RULE = rule(
    __name__,
    propose=proposing(_with_dropout, worth=_WORTH_A_TRIAL),
    note=note,
    title="Fused attention that is not fused",
    rewrites_line=True,
)
