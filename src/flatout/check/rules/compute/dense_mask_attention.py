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
from typing import Literal, NamedTuple

from flatout.core.parts import rule
from flatout.core.records.evidence import Evidence
from flatout.core.records.finding import Finding, Note
from flatout.core.records.trial import TimeAttentionCall
from flatout.machine.cost.accounting import (
    around,
    facts_named,
    group_by,
    has_backward,
    milliseconds,
    operators_at,
)
from flatout.machine.cost.suspects import proposing, tried

_WORTH_A_TRIAL = 0.05
_CURES: dict[str, Literal["causal", "no-mask"]] = {"causal": "causal", "all-true": "no-mask"}
_SAYS = {"causal": "exactly the causal one", "all-true": "true everywhere"}
_SKIPPED = {"documents": "keeps documents apart", "window": "is a window", "sparse": "hides most pairs"}
_EDITS = {
    "causal": "F.scaled_dot_product_attention(q, k, v, is_causal=True) without attn_mask",
    "all-true": "leave attn_mask out",
}


class _MaskedAttention(NamedTuple):
    rows: tuple[int, ...]
    trial: TimeAttentionCall
    kind: str


def check(evidence: Evidence) -> Iterator[Finding]:
    """Yield one finding per line."""
    for attention in tried(evidence, _masked):
        rows, kind = attention.suspect.rows, attention.suspect.kind
        yield Finding(
            where=evidence.source_of(evidence.operators[rows[0]].source),
            cost_s=attention.cost_s,
            saved_s=around(attention.saved_s, 0.15),
            because=f"the dense mask given to attention is {_SAYS[kind]}; attention takes {milliseconds(attention.cost_s)} a "
            f"step, and {attention.remaining:.0%} of that without it (tried)",
            edit=_EDITS[kind],
            module=evidence.operators[rows[0]].module,
            operators=rows,
            basis="trial",
        )


def note(evidence: Evidence) -> Iterator[Note]:
    """Yield a note for each line whose mask hides pairs that are computed all the same."""
    reported = set()
    for fact in facts_named(evidence, "attention-mask"):
        if fact.kind in _SKIPPED and fact.source not in reported:
            reported.add(fact.source)
            yield Note(
                where=evidence.source_of(fact.source),
                text=f"the mask {_SKIPPED[fact.kind]} and lets {fact.value:.0%} of the pairs through, but all are computed; "
                "flatout.attention with a mask of flatout.masks computes only those",
            )


def _masked(evidence: Evidence) -> Iterator[_MaskedAttention]:
    """Attention of the lines whose masks are all of one kind that has a cure, with the mask replaced."""
    for source, facts in group_by(facts_named(evidence, "attention-mask"), lambda f: f.source).items():
        rows = operators_at(evidence, source, "aten._scaled_dot_product")
        kinds = {f.kind for f in facts}
        if len(kinds) == 1 and (kind := kinds.pop()) in _CURES and rows:
            yield _MaskedAttention(rows, _trial_of(evidence, rows, kind), kind)


def _trial_of(evidence: Evidence, rows: tuple[int, ...], kind: str) -> TimeAttentionCall:
    operators = [evidence.operators[i] for i in rows]
    first = next((o for o in operators if o.phase != "backward"), operators[0])
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


RULE = rule(
    __name__,
    check,
    propose=proposing(_masked, worth=_WORTH_A_TRIAL),
    note=note,
    title="A dense mask where a flag would do",
    rewrites_line=True,
)
