"""scaled_dot_product_attention falls back to separate products.

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

from flatout.cost.accounting import around, group_by, has_backward, kept_fraction, milliseconds, result_of, seconds_of
from flatout.records.evidence import Evidence, Operator
from flatout.records.finding import Finding, Note, Rule
from flatout.records.trial import TimeAttentionCall

_DROPOUT = ("aten.bernoulli_", "aten.native_dropout", "aten.bernoulli")
_USUAL_DROPOUT = 0.1
_WORTH_A_TRIAL = 0.05
_SHORTEST = 32


def propose(evidence: Evidence) -> Iterator[TimeAttentionCall]:
    """Time each attention that has dropout without it."""
    for source, softmax in _fallbacks(evidence).items():
        rows = _rows(evidence, source, softmax)
        if _has_dropout(evidence, rows) and seconds_of(evidence, rows) > _WORTH_A_TRIAL * evidence.steps.step_s:
            yield _trial_of(evidence, rows, softmax)


def check(evidence: Evidence) -> Iterator[Finding]:
    """Yield one finding per line."""
    for source, softmax in _fallbacks(evidence).items():
        rows = _rows(evidence, source, softmax)
        result = result_of(evidence, _trial_of(evidence, rows, softmax)) if _has_dropout(evidence, rows) else None
        if result is None:
            continue
        cost_s, kept = seconds_of(evidence, rows), kept_fraction(result)
        yield Finding(
            rule=RULE.id,
            regime="bandwidth",
            where=evidence.source_of(source),
            cost_s=cost_s,
            saved_s=around(cost_s * max(0.0, 1 - kept), 0.15),
            because=f"with dropout on its weights attention has no fused kernel here and writes scores of "
            f"{'x'.join(map(str, softmax.outputs[0].shape))}, {milliseconds(cost_s)} a step; without that dropout it "
            f"takes {kept:.0%} "
            "(tried)",
            edit="dropout_p=0.0 in attention (dropout on its output keeps a regularisation), if the quality allows it",
            module=softmax.module,
            levers=RULE.levers,
            operators=rows,
            basis="trial",
        )


def note(evidence: Evidence) -> Iterator[Note]:
    """Yield a note for each line that falls back for another reason."""
    for source, softmax in _fallbacks(evidence).items():
        if not _has_dropout(evidence, _rows(evidence, source, softmax)):
            yield Note(
                rule=RULE.id,
                where=evidence.source_of(source),
                text="scaled_dot_product_attention runs as separate products here; head size, dtype, a mask that needs "
                "a gradient, or "
                "tensors that are not (batch, heads, tokens, size) keep it from a fused kernel",
            )


def _fallbacks(evidence: Evidence) -> dict[int, Operator]:
    """Line -> the largest fallback softmax on it."""
    found = [
        o
        for o in evidence.operators
        if o.op == "aten._safe_softmax"
        and o.phase != "backward"
        and o.source >= 0
        and len(o.outputs[0].shape) == 4
        and min(o.outputs[0].shape[-2:]) >= _SHORTEST
    ]
    by_line = group_by(found, lambda o: o.source)
    return {source: max(ops, key=lambda o: o.outputs[0].num_elements) for source, ops in by_line.items()}


def _rows(evidence: Evidence, source: int, softmax: Operator) -> tuple[int, ...]:
    """Operators of the line, forward and backward, that touch scores of this size."""
    queries, keys = softmax.outputs[0].shape[-2:]
    return tuple(
        i
        for i, o in enumerate(evidence.operators)
        if o.source == source and any(t.shape[-2:] in ((queries, keys), (keys, queries)) for t in o.inputs + o.outputs)
    )


def _has_dropout(evidence: Evidence, rows: tuple[int, ...]) -> bool:
    return any(evidence.operators[i].op in _DROPOUT for i in rows)


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


RULE = Rule(
    id="compute.sdpa-math-path",
    title="Fused attention that is not fused",
    module=__name__,
    check=check,
    propose=propose,
    note=note,
    levers=("memory.fused-attention",),
)
