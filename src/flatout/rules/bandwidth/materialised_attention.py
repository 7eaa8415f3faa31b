"""Attention that writes its S x S scores to memory.

Costs        Memory and traffic quadratic in the sequence: scores, mask, softmax and dropout each read and write S x S.
Evidence     A product whose result reaches a softmax over keys and from there another product, by the data flow of the step.
             Trial: scaled_dot_product_attention at the same shapes, forward and backward.
Levers       memory.fused-attention
False alarm  Short sequences, where the fused kernel gains nothing: the trial says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from flatout.cost.accounting import around, group_by, has_backward, kept_fraction, result_of, seconds_of
from flatout.cost.trace import consumers, walk_back, walk_forward
from flatout.records.evidence import Evidence, Operator
from flatout.records.finding import Finding, Rule
from flatout.records.trial import TimeAttention

_SHORTEST: Final = 32
_WORTH_A_TRIAL: Final = 0.05
_PRODUCTS: Final = frozenset({"aten.bmm", "aten.baddbmm", "aten.matmul"})
_BETWEEN_NAMES: Final = """
mul mul_ div div_ add add_ sub masked_fill masked_fill_ where view _unsafe_view reshape expand clone _to_copy
tanh native_dropout dropout bernoulli_ transpose permute detach alias copy_ nan_to_num slice unsqueeze squeeze
rsub
"""
_BETWEEN: Final = frozenset(f"aten.{name}" for name in _BETWEEN_NAMES.split())


class Attention(NamedTuple):
    """One written-out attention: its softmax call, both products, and the lines between."""

    softmax: int
    scores: int
    values: int
    sources: tuple[int, ...]
    masked: bool
    causal: bool
    dropout: float


def propose(evidence: Evidence) -> Iterator[TimeAttention]:
    """Time the fused attention once for each shape that matters."""
    for found in _by_lines(evidence).values():
        if seconds_of(evidence, _rows(evidence, found)) > _WORTH_A_TRIAL * evidence.steps.step_s:
            yield _trial_of(evidence, found[0])


def check(evidence: Evidence) -> Iterator[Finding]:
    """Yield one finding per place where attention is written out; several layers share it."""
    for found in _by_lines(evidence).values():
        result = result_of(evidence, _trial_of(evidence, found[0]))
        if result is None:
            continue
        rows = _rows(evidence, found)
        cost_s = seconds_of(evidence, rows)
        softmax = evidence.operators[evidence.trace.operator[found[0].softmax]]
        size = softmax.outputs[0]
        kept = kept_fraction(result)
        sources = [s for s in map(evidence.source_of, found[0].sources) if s is not None]
        where = evidence.source_of(softmax.source)
        yield Finding(
            rule=RULE.id,
            regime="bandwidth",
            where=where,
            cost_s=cost_s,
            saved_s=around(cost_s * (1 - kept), 0.15),
            because=f"{len(found)} attention(s) write scores of {'x'.join(map(str, size.shape))} {size.dtype} to memory, "
            f"{cost_s * 1e3:.2f} ms a step; fused attention takes {kept:.0%} of that at these shapes (tried)",
            edit="F.scaled_dot_product_attention(q, k, v, is_causal=...) in place of these lines; "
            "for nn.MultiheadAttention pass need_weights=False",
            also=tuple(s for s in sources if s != where),
            module=softmax.module,
            levers=RULE.levers,
            operators=rows,
            basis="trial",
        )


def _by_lines(evidence: Evidence) -> dict[tuple[int, ...], list[Attention]]:
    return group_by(_attentions(evidence), lambda a: a.sources)


def _attentions(evidence: Evidence) -> Iterator[Attention]:
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
        chain = [scores, call, values] + [
            c
            for c in before + after
            if scores < c < values and any(t.shape[-1:] == (keys,) for t in _op(evidence, c).outputs)
        ]
        ops = {_op(evidence, c).op for c in chain}
        masks = [
            c
            for c in before
            if _op(evidence, c).op in ("aten.masked_fill", "aten.masked_fill_", "aten.where", "aten.add")
        ]
        sources = tuple(sorted({_op(evidence, c).source for c in chain if _op(evidence, c).source >= 0}))
        has_dropout = bool(ops & {"aten.native_dropout", "aten.bernoulli_"})
        yield Attention(
            call, scores, values, sources, bool(masks), _is_causal(evidence, masks), 0.1 if has_dropout else 0.0
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
        squares = [s for s in shapes[1:] if len(s) >= 2 and s[-1] == s[-2] and all(n == 1 for n in s[:-2])]
        if squares:
            return True
    return False


def _rows(evidence: Evidence, found: list[Attention]) -> tuple[int, ...]:
    """Operators, forward and backward, of these lines that touch the scores' shape."""
    sources = set(found[0].sources)
    queries, keys = _op(evidence, found[0].softmax).outputs[0].shape[-2:]
    return tuple(
        i
        for i, o in enumerate(evidence.operators)
        if o.source in sources and any(t.shape[-2:] in ((queries, keys), (keys, queries)) for t in o.inputs + o.outputs)
    )


def _trial_of(evidence: Evidence, found: Attention) -> TimeAttention:
    score = _op(evidence, found.softmax).outputs[0].shape
    product = _op(evidence, found.scores)
    head_dim = product.inputs[-2].shape[-1] if len(product.inputs) >= 2 else 64
    lead = 1
    for size in score[:-2]:
        lead *= size
    heads = score[1] if len(score) == 4 else 1
    return TimeAttention(
        batch=lead // heads,
        heads=heads,
        q_len=score[-2],
        kv_len=score[-1],
        head_dim=head_dim,
        dtype=_op(evidence, found.softmax).outputs[0].dtype,
        causal=found.causal and score[-1] == score[-2],
        masked=found.masked,
        dropout=found.dropout,
        backward=has_backward(evidence, _rows(evidence, [found])),
    )


RULE = Rule(
    id="bandwidth.materialised-attention",
    title="Attention that writes its scores to memory",
    module=__name__,
    check=check,
    propose=propose,
    levers=("memory.fused-attention",),
)
