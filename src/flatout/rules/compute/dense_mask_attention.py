"""Attention is given a dense mask that a flag, or nothing, would replace.

Costs        With a dense mask the fused kernel computes all pairs of queries and keys, and reads the mask; with is_causal=True it
             skips half of them.
Evidence     The values of the mask in a deep step: exactly lower-triangular, or true everywhere. Trial: the same attention with
             is_causal=True, or without the mask, forward and backward.
Levers       graph.structured-mask
False alarm  Padding and biases: such masks stay. Documents, windows and other masks that hide most pairs are told as a note; what
             skipping those gains is measured by the lever.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from flatout.cost.accounting import (
    around,
    facts_named,
    has_backward,
    kept_fraction,
    milliseconds,
    operators_at,
    result_of,
    seconds_of,
)
from flatout.records.evidence import Evidence
from flatout.records.finding import Finding, Note, Rule
from flatout.records.trial import TimeAttentionCall

_WORTH_A_TRIAL = 0.05
_CURES: dict[str, Literal["causal", "no-mask"]] = {"causal": "causal", "all-true": "no-mask"}
_SAYS = {"causal": "exactly the causal one", "all-true": "true everywhere"}
_SKIPPED = {"documents": "keeps documents apart", "window": "is a window", "sparse": "hides most pairs"}
_EDITS = {
    "causal": "F.scaled_dot_product_attention(q, k, v, is_causal=True) without attn_mask",
    "all-true": "leave attn_mask out",
}


def propose(evidence: Evidence) -> Iterator[TimeAttentionCall]:
    """Time each attention with the mask replaced."""
    for source, kind in _masked(evidence).items():
        rows = _rows(evidence, source)
        if rows and seconds_of(evidence, rows) > _WORTH_A_TRIAL * evidence.steps.step_s:
            yield _trial_of(evidence, rows, kind)


def check(evidence: Evidence) -> Iterator[Finding]:
    """Yield one finding per line."""
    for source, kind in _masked(evidence).items():
        rows = _rows(evidence, source)
        result = result_of(evidence, _trial_of(evidence, rows, kind)) if rows else None
        if result is None:
            continue
        cost_s, kept = seconds_of(evidence, rows), kept_fraction(result)
        yield Finding(
            rule=RULE.id,
            regime="compute",
            where=evidence.source_of(source),
            cost_s=cost_s,
            saved_s=around(cost_s * max(0.0, 1 - kept), 0.15),
            because=f"the dense mask given to attention is {_SAYS[kind]}; attention takes {milliseconds(cost_s)} a step, and "
            f"{kept:.0%} of that without it (tried)",
            edit=_EDITS[kind],
            module=evidence.operators[rows[0]].module,
            levers=RULE.levers,
            operators=rows,
            basis="trial",
        )


def note(evidence: Evidence) -> Iterator[Note]:
    """Yield a note for each line whose mask hides pairs that are computed all the same."""
    told = set()
    for fact in facts_named(evidence, "attention-mask"):
        if fact.kind in _SKIPPED and fact.source not in told:
            told.add(fact.source)
            yield Note(
                rule=RULE.id,
                where=evidence.source_of(fact.source),
                text=f"the mask {_SKIPPED[fact.kind]} and lets {fact.value:.0%} of the pairs through, but all are computed; "
                "flatout.attention with a mask of flatout.masks computes only those",
            )


def _masked(evidence: Evidence) -> dict[int, str]:
    """Line -> kind of its mask, where all masks of the line are of one kind that has a cure."""
    kinds: dict[int, set[str]] = {}
    for fact in facts_named(evidence, "attention-mask"):
        kinds.setdefault(fact.source, set()).add(fact.kind)
    return {s: kind for s, found in kinds.items() if len(found) == 1 and (kind := next(iter(found))) in _CURES}


def _rows(evidence: Evidence, source: int) -> tuple[int, ...]:
    return operators_at(evidence, source, "aten._scaled_dot_product")


def _trial_of(evidence: Evidence, rows: tuple[int, ...], kind: str) -> TimeAttentionCall:
    forward = [evidence.operators[i] for i in rows if evidence.operators[i].phase != "backward"]
    first = forward[0] if forward else evidence.operators[rows[0]]
    batch, heads, q_len, head_dim = first.inputs[0].shape
    return TimeAttentionCall(
        batch=batch,
        heads=heads,
        q_len=q_len,
        kv_len=first.inputs[1].shape[-2],
        head_dim=head_dim,
        dtype=first.inputs[0].dtype,
        masked=True,
        dropout=0.0,
        backward=has_backward(evidence, rows),
        cure=_CURES[kind],
    )


RULE = Rule(
    id="compute.dense-mask-attention",
    title="A dense mask where a flag would do",
    module=__name__,
    check=check,
    propose=propose,
    note=note,
    levers=("graph.structured-mask",),
)
