"""PyTorch's scaled_dot_product_attention falls back to separate products.

Costs        The S x S scores are written to memory, as if attention were written out by hand; only the line looks fused.
Evidence     The softmax that only torch's fallback uses (aten._safe_softmax) in a step, and dropout beside it: no fused kernel
             for the CPU takes dropout. Trial: the same attention with dropout_p=0, forward and backward.
Levers       memory.fused-attention
False alarm  Short sequences, where the fused kernel gains nothing: the trial says so. Leaving dropout out of the weights changes
             the regularisation: a choice, told as one. Other reasons (head size, dtype, a mask with a gradient) are told in a
             note.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from flatout.core.parts import rule
from flatout.core.records.evidence import Evidence, Operator
from flatout.core.records.finding import Finding, Note
from flatout.core.records.trial import TimeAttentionCall
from flatout.machine.cost.accounting import around, group_by, has_backward, milliseconds, rows_with_shape
from flatout.machine.cost.suspects import proposing, tried

_DROPOUT = ("aten.bernoulli_", "aten.native_dropout", "aten.bernoulli")
_USUAL_DROPOUT = 0.1
_WORTH_A_TRIAL = 0.05
_SHORTEST = 32


class _Fallback(NamedTuple):
    rows: tuple[int, ...]
    """Operators of the line, forward and backward, that touch scores of this size."""
    trial: TimeAttentionCall
    softmax: Operator
    has_dropout: bool


def check(evidence: Evidence) -> Iterator[Finding]:
    """Yield one finding per line."""
    for attention in tried(evidence, _with_dropout):
        softmax = attention.suspect.softmax
        yield Finding(
            regime="bandwidth",
            where=evidence.source_of(softmax.source),
            cost_s=attention.cost_s,
            saved_s=around(attention.saved_s, 0.15),
            because=f"with dropout on its weights attention has no fused kernel here and writes scores of "
            f"{'x'.join(map(str, softmax.outputs[0].shape))}, {milliseconds(attention.cost_s)} a step; without that dropout it "
            f"takes {attention.remaining:.0%} (tried)",
            edit="dropout_p=0.0 in attention (dropout on its output keeps a regularisation), if the quality allows it",
            module=softmax.module,
            operators=attention.suspect.rows,
            basis="trial",
        )


def note(evidence: Evidence) -> Iterator[Note]:
    """Yield a note for each line that falls back for another reason."""
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
    check,
    propose=proposing(_with_dropout, worth=_WORTH_A_TRIAL),
    note=note,
    title="Fused attention that is not fused",
    rewrites_line=True,
)
