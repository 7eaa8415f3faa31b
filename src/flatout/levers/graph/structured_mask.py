"""Attention under a mask that is written out pair by pair skips the pairs that the mask hides.

What        `scaled_dot_product_attention(..., attn_mask=mask)`, where the values of the mask are a structure (nothing hidden,
            causal, a window, documents) or let only few pairs through: `is_causal=True`, no mask, or `flatout.attention` with the
            structure. Each mask is looked at once, and again after it has changed.
Guarantee   BOUNDED: the same sums over the pairs that are seen, in another order.
Refuses     Biases, padding, masks in which a query sees nothing; dropout.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

from flatout.cost.accounting import facts_named, milliseconds, operators_at, seconds_of
from flatout.errors import EditError
from flatout.levers.syntax.calls import argument, call_in, with_argument, without_argument
from flatout.levers.syntax.source import expression, place_of, with_expression
from flatout.records.evidence import Evidence
from flatout.records.finding import Finding
from flatout.records.lever import Candidate, Lever, Parameters, Refusal, Seams, string

if TYPE_CHECKING:
    from torch import Tensor

    from flatout.kernels.attention.recognised import Recognised

_SPARSE: Final = {"documents", "window", "sparse"}
_FLAGS: Final = {"causal", "all-true"}
_CALL: Final = ("torch.nn.functional.scaled_dot_product_attention",)
_POSITION: Final = 3


def propose(evidence: Evidence, findings: Sequence[Finding]) -> Iterator[Candidate | Refusal]:
    """Where a flag was tried and was faster, and where masks hide most pairs."""
    kinds: dict[int, set[str]] = {}
    shares: dict[int, float] = {}
    for fact in facts_named(evidence, "attention-mask"):
        kinds.setdefault(fact.source, set()).add(fact.kind)
        shares[fact.source] = max(fact.value, shares.get(fact.source, 0.0))
    told = {f.where: f for f in findings}
    best_s = least_s = 0.0
    becauses, where = [], None
    for source, found in kinds.items():
        finding = told.get(evidence.source_of(source))
        cost_s = seconds_of(evidence, operators_at(evidence, source, "aten._scaled_dot_product"))
        if finding is not None:
            least_s, best_s = least_s + finding.saved_s[0], best_s + finding.saved_s[1]
            becauses.append(finding.because)
        elif found <= _SPARSE and cost_s:
            best_s += (1 - shares[source]) * cost_s
            becauses.append(
                f"attention takes {milliseconds(cost_s)} a step, and its mask hides {1 - shares[source]:.0%} of the pairs"
            )
        else:
            continue
        where = where or evidence.source_of(source)
    if not becauses:
        yield Refusal(lever=LEVER.id, because="no attention has a mask whose pairs could be skipped")
        return
    parameters: Parameters = {}
    only = next(iter(kinds.values()))
    if len(kinds) == 1 and len(only) == 1 and only <= _FLAGS and where is not None:
        try:
            parameters = {**place_of(evidence, where), "kind": next(iter(only))}
        except EditError:  # a line of a library: the flag can be set, and not written
            parameters = {}
    yield Candidate(
        lever=LEVER.id, parameters=parameters, saved_s=(least_s, best_s), where=where, because="; ".join(becauses[:3])
    )


def apply(seams: Seams, parameters: Parameters) -> None:
    """Put the look at the mask before torch's function."""
    import torch
    from torch.nn import functional as F

    from flatout.errors import NotFused
    from flatout.kernels.attention.front import attention

    original = F.scaled_dot_product_attention
    known = _Known()

    def scaled_dot_product_attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        given: dict[str, Any] = {"dropout_p": dropout_p, "scale": scale, "enable_gqa": enable_gqa}
        is_plain = query.dim() == 4 and not dropout_p and not is_causal and not torch.compiler.is_compiling()
        pairs = (query.size(-2), key.size(-2))
        found = known.look_at(attn_mask, pairs) if is_plain and attn_mask is not None else None
        if found is None or found.mask is None:
            return original(query, key, value, attn_mask=attn_mask, is_causal=is_causal, **given)
        if found.kind in _FLAGS:
            seams.note(LEVER.id)
            return original(query, key, value, is_causal=found.kind == "causal", **given)
        try:
            out = attention(query, key, value, mask=found.mask, scale=scale, enable_gqa=enable_gqa)
        except NotFused:  # nothing is noted, and the run says that the lever met nothing
            return original(query, key, value, attn_mask=attn_mask, **given)
        seams.note(LEVER.id)
        return out

    seams.replace(F, "scaled_dot_product_attention", scaled_dot_product_attention)


class _Known:
    """Masks that were looked at, each with the tensor that it is a view of."""

    def __init__(self) -> None:
        from torch.utils.weak import WeakIdKeyDictionary

        self._of: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def look_at(self, given: Tensor, pairs: tuple[int, int]) -> Recognised | None:
        """None for what is not a mask of these numbers of queries and keys."""
        from flatout.kernels.attention.recognised import recognised

        if given.requires_grad or not 2 <= given.dim() <= 4 or given.shape[-2:] != pairs:
            return None
        if given.is_inference():  # torch does not count its changes
            return recognised(given)
        owner = given._base if given._base is not None else given
        now = (given._version, given.storage_offset(), given.shape, given.stride(), given.dtype)
        kept: dict[object, Recognised] = self._of.setdefault(owner, {})
        if now not in kept:
            kept[now] = recognised(given)
        return kept[now]


def edit(text: str, parameters: Parameters) -> str:
    """`attn_mask=mask` becomes `is_causal=True`, or goes.

    Raises EditError for other structures, whose mask is better made of flatout.masks where the dense one is made.
    """
    if "kind" not in parameters:
        raise EditError(
            "the mask is no flag; give flatout.attention the structure, from flatout.masks, where the mask is made"
        )
    kind = string(parameters, "kind")
    module, call = call_in(text, parameters, _CALL)
    if argument(call, "attn_mask", _POSITION) is None:
        raise EditError("no attn_mask is given here")
    if argument(call, "is_causal", _POSITION + 2) is not None or argument(call, "dropout_p", _POSITION + 1) is not None:
        raise EditError("is_causal or dropout_p is given beside attn_mask")
    new = without_argument(call, "attn_mask", _POSITION)
    if kind == "causal":
        new = with_argument(new, "is_causal", expression("True"))
    return with_expression(module, call, new).code


LEVER = Lever(
    id="graph.structured-mask",
    title="Pairs that a mask hides are skipped",
    guarantee="bounded",
    module=__name__,
    propose=propose,
    apply=apply,
    edit=edit,
)
