"""Attention that writes its S x S scores to memory.

Costs        Memory and traffic quadratic in the sequence: scores, mask, softmax and dropout each read and write S x S.
Evidence     A product whose result reaches a softmax over keys and from there another product, by the data flow of the step.
             Trial: scaled_dot_product_attention at the same shapes, forward and backward.
Levers       memory.fused-attention
False alarm  Short sequences, where the fused kernel gains nothing: the trial says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Final, NamedTuple

from flatout.core.parts import rule
from flatout.core.records.evidence import Evidence, Operator
from flatout.core.records.finding import Finding
from flatout.core.records.trial import TimeAttention
from flatout.machine.cost.accounting import around, group_by, has_backward, rows_with_shape
from flatout.machine.cost.suspects import proposing, tried
from flatout.machine.cost.trace import consumers, walk_back, walk_forward

_SHORTEST: Final = 32
_WORTH_A_TRIAL: Final = 0.05
_PRODUCTS: Final = frozenset({"aten.bmm", "aten.baddbmm", "aten.matmul"})
_MASKS: Final = ("aten.masked_fill", "aten.masked_fill_", "aten.where", "aten.add")
_BETWEEN_NAMES: Final = """
mul mul_ div div_ add add_ sub masked_fill masked_fill_ where view _unsafe_view reshape expand clone _to_copy
tanh native_dropout dropout bernoulli_ transpose permute detach alias copy_ nan_to_num slice unsqueeze squeeze
rsub
"""
_BETWEEN: Final = frozenset(f"aten.{name}" for name in _BETWEEN_NAMES.split())


_DRAWS: Final = ("aten.native_dropout", "aten.bernoulli_")
_USUAL_RATE: Final = 0.1
"""Of dropout in the trial: what it takes does not depend on the rate."""


class WrittenAttention(NamedTuple):
    """One written-out attention: its softmax call, both products, and the lines between."""

    softmax: int
    scores: int
    values: int
    sources: tuple[int, ...]
    masked: bool
    causal: bool
    dropout: float


class _Attentions(NamedTuple):
    rows: tuple[int, ...]
    """Operators, forward and backward, of these lines that touch the scores' shape."""
    trial: TimeAttention
    all: list[WrittenAttention]


def check(evidence: Evidence) -> Iterator[Finding]:
    """Yield one finding per place where attention is written out; several layers share it."""
    for place in tried(evidence, _by_lines):
        rows, _, found = place.suspect
        softmax = _op(evidence, found[0].softmax)
        size = softmax.outputs[0]
        yield Finding(
            where=evidence.source_of(softmax.source),
            cost_s=place.cost_s,
            saved_s=around(place.cost_s * (1 - place.remaining), 0.15),
            because=f"{len(found)} attention{' writes' if len(found) == 1 else 's write'} scores of "
            f"{'x'.join(map(str, size.shape))} {size.dtype} to memory, {place.cost_s * 1e3:.2f} ms a step; fused attention takes "
            f"{place.remaining:.0%} of that at these shapes (tried)",
            edit=f"F.scaled_dot_product_attention(q, k, v, is_causal=...{_dropout_argument(found[0])}) in place of these lines; "
            "for nn.MultiheadAttention pass need_weights=False",
            also=evidence.sources_of(found[0].sources),
            module=softmax.module,
            operators=rows,
            basis="trial",
        )


def _by_lines(evidence: Evidence) -> Iterator[_Attentions]:
    for sources, found in group_by(_attentions(evidence), lambda a: a.sources).items():
        queries, keys = _op(evidence, found[0].softmax).outputs[0].shape[-2:]
        rows = rows_with_shape(evidence, set(sources), {(queries, keys), (keys, queries)})
        yield _Attentions(rows, _trial_of(evidence, found[0], backward=has_backward(evidence, rows)), found)


def _attentions(evidence: Evidence) -> Iterator[WrittenAttention]:
    trace, operators = evidence.trace, evidence.operators
    readers = consumers(trace)
    for call, row in enumerate(trace.operator):
        operator = operators[row]
        if operator.op != "aten._softmax" or operator.phase == "backward" or not _is_square_enough(operator):
            continue
        before = list(walk_back(trace, operators, call, _BETWEEN))
        scores = next((c for c in before if operators[trace.operator[c]].op in _PRODUCTS), None)
        after = list(walk_forward(readers, trace, operators, call, _BETWEEN))
        values = next((c for c in after if operators[trace.operator[c]].op in _PRODUCTS), None)
        if scores is None or values is None or operators[trace.operator[values]].phase == "backward":
            continue
        keys = operator.outputs[0].shape[-1]
        between = [c for c in before + after if scores < c < values]
        chain = [
            scores,
            call,
            values,
            *(c for c in between if any(t.shape[-1:] == (keys,) for t in _op(evidence, c).outputs)),
        ]
        masks = [c for c in before if _op(evidence, c).op in _MASKS]
        sources = tuple(sorted({_op(evidence, c).source for c in chain if _op(evidence, c).source >= 0}))
        # On a CPU the mask is drawn beside the chain, into a tensor of its own.
        drawn = (_op(evidence, c) for c in range(scores + 1, values))
        has_dropout = any(o.op in _DRAWS and o.outputs and o.outputs[0].shape[-1:] == (keys,) for o in drawn)
        yield WrittenAttention(
            call, scores, values, sources, bool(masks), _is_causal(evidence, masks), _USUAL_RATE if has_dropout else 0.0
        )


def _op(evidence: Evidence, call: int) -> Operator:
    return evidence.operators[evidence.trace.operator[call]]


def _is_square_enough(operator: Operator) -> bool:
    shape = operator.outputs[0].shape
    return len(shape) >= 3 and shape[-1] >= _SHORTEST and shape[-2] >= _SHORTEST


def _is_causal(evidence: Evidence, masks: list[int]) -> bool:
    """Whether a mask over (queries, keys) alone is applied: with equal lengths it is a causal one in nearly all code."""
    for call in masks:
        shapes = [t.shape for t in _op(evidence, call).inputs]
        if any(len(s) >= 2 and s[-1] == s[-2] and all(n == 1 for n in s[:-2]) for s in shapes[1:]):
            return True
    return False


def _trial_of(evidence: Evidence, found: WrittenAttention, *, backward: bool) -> TimeAttention:
    scores = _op(evidence, found.softmax).outputs[0]
    product = _op(evidence, found.scores)
    heads = scores.shape[1] if len(scores.shape) == 4 else 1
    q_len, kv_len = scores.shape[-2:]
    return TimeAttention(
        batch=prod(scores.shape[:-2]) // heads,
        heads=heads,
        q_len=q_len,
        kv_len=kv_len,
        head_dim=product.inputs[-2].shape[-1] if len(product.inputs) >= 2 else 64,
        dtype=scores.dtype,
        causal=found.causal and kv_len == q_len,
        masked=found.masked,
        dropout=found.dropout,
        backward=backward,
    )


def _dropout_argument(attention: WrittenAttention) -> str:
    """What keeps the dropout of these lines; the rate is not in the evidence."""
    return ", dropout_p=p if self.training else 0.0" if attention.dropout > 0 else ""


RULE = rule(
    __name__,
    check,
    propose=proposing(_by_lines, worth=_WORTH_A_TRIAL),
    title="Attention that writes its scores to memory",
    rewrites_line=True,
)
