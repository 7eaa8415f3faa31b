"""Attention under a mask that is written out pair by pair skips the pairs that the mask hides.

What        `scaled_dot_product_attention(..., attn_mask=mask)`, where the values of the mask are a structure (nothing hidden,
            causal, a window, documents) or let only few pairs through: `is_causal=True`, no mask, or `flatout.attention` with the
            structure. Each mask is looked at once, and again after it has changed. Compiled graphs end before such a call, and go
            on after it; with `without_breaks` they hold an operator that looks at the mask as it runs, once a step, and takes
            FlashAttention for windows and documents.
Guarantee   BOUNDED: the same sums over the pairs that are seen, in another order.
Refuses     Biases, padding, masks in which a query sees nothing; dropout.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

from flatout.core.errors import EditError, LeverRefused
from flatout.core.parts import lever
from flatout.core.records.evidence import Evidence
from flatout.core.records.finding import Finding
from flatout.core.records.lever import Candidate, Hooks, Parameters, string
from flatout.machine.cost.accounting import facts_named, milliseconds, operator_seconds, operators_at
from flatout.tune.rewrite.calls import argument, call_in, with_argument, without_argument
from flatout.tune.rewrite.source import expression, readable_place, with_expression

if TYPE_CHECKING:
    from torch import Tensor

    from flatout.blocks.kernels.attention.recognition import Recognised
    from flatout.core.runtime.patches import AttentionCall

_SPARSE: Final = {"documents", "window", "sparse"}
_FLAGS: Final = {"causal", "all-true"}
_CALL: Final = ("torch.nn.functional.scaled_dot_product_attention",)
_POSITION: Final = 3
_BANDS: Final = {"documents", "window"}
"""What FlashAttention takes."""
_LATER: Final = 0.99
"""The part of the lever's promise with which graphs without breaks are tried behind all others, once the model is compiled."""


def propose(evidence: Evidence, findings: Sequence[Finding]) -> Iterator[Candidate]:
    """Propose a flag where a trial found it faster, and a sparse form where masks hide most pairs."""
    kinds: dict[int, set[str]] = {}
    shares: dict[int, float] = {}
    for fact in facts_named(evidence, "attention-mask"):
        kinds.setdefault(fact.source, set()).add(fact.kind)
        shares[fact.source] = max(fact.value, shares.get(fact.source, 0.0))
    by_line = {f.where: f for f in findings}
    best_s = least_s = 0.0
    becauses, where = [], None
    for source, found in kinds.items():
        finding = by_line.get(evidence.source_of(source))
        cost_s = operator_seconds(evidence, operators_at(evidence, source, "aten._scaled_dot_product"))
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
        raise LeverRefused("no attention has a mask whose pairs could be skipped")
    parameters: Parameters = {}
    only = next(iter(kinds.values()))
    if len(kinds) == 1 and len(only) == 1 and only <= _FLAGS and where is not None:
        place = readable_place(evidence, where)  # none in a library: there the flag can be set, and not written
        parameters = place | {"kind": next(iter(only))} if place else {}
    because = "; ".join(becauses[:3])
    yield Candidate(parameters=parameters, saved_s=(least_s, best_s), where=where, because=because)
    if evidence.workload.device != "cpu" and set().union(*kinds.values()) <= _BANDS:
        whole: Parameters = {"without_breaks": True}
        because = f"{because}; compiled graphs need not end at attention"
        yield Candidate(parameters=whole, saved_s=(_LATER * least_s, _LATER * best_s), where=where, because=because)


def apply(hooks: Hooks, parameters: Parameters) -> None:
    """Look at the mask before each call of torch's function, and use its structure."""
    import torch
    from torch.nn import functional as F

    from flatout.blocks.kernels.attention.api import attention
    from flatout.blocks.kernels.attention.dense_masks import attention_by_dense_mask, when_structure_is_used
    from flatout.core.errors import NotFused
    from flatout.core.runtime.patches import attention_function

    is_whole = bool(parameters.get("without_breaks"))
    if is_whole:
        hooks.at_start(lambda: when_structure_is_used(lambda: hooks.note(LEVER.id)))
    original = F.scaled_dot_product_attention
    known = _Known()

    def with_structure(call: AttentionCall) -> Tensor:
        is_plain = call.query.dim() == 4 and not call.dropout_p and not call.is_causal
        if not is_plain or call.attn_mask is None or not _is_of_pairs(call, call.attn_mask):
            return call.run(original)
        if not torch.compiler.is_compiling():
            return with_mask(call)
        if is_whole and _is_square(call):
            return attention_by_dense_mask(call.query, call.key, call.value, call.attn_mask, scale=call.scale)
        # between compiled graphs: a structure is read from the mask's values, which a graph has not got
        out: Tensor = outside_graphs(call)
        return out

    def with_mask(call: AttentionCall) -> Tensor:
        query, key, value = call.query, call.key, call.value
        assert call.attn_mask is not None
        found = known.look_at(call.attn_mask)
        if found.mask is None:
            return call.run(original)
        if found.kind in _FLAGS:
            hooks.note(LEVER.id)
            return call._replace(attn_mask=None, is_causal=found.kind == "causal").run(original)
        try:
            out = attention(query, key, value, mask=found.mask, scale=call.scale, enable_gqa=call.enable_gqa)
        except NotFused:  # nothing is noted, and the run says that the lever met nothing
            return call.run(original)
        hooks.note(LEVER.id)
        return out

    outside_graphs = torch.compiler.disable(with_mask)
    hooks.replace(F, "scaled_dot_product_attention", attention_function(with_structure))


def _is_of_pairs(call: AttentionCall, mask: Tensor) -> bool:
    """Whether the mask tells of each query and key, and needs no gradient. That of padding tells of keys."""
    return (
        2 <= mask.dim() <= 4 and mask.shape[-2:] == (call.query.size(-2), call.key.size(-2)) and not mask.requires_grad
    )


def _is_square(call: AttentionCall) -> bool:
    """Whether there are as many queries as keys, and the heads are as torch would take them."""
    query, key = call.query, call.key
    return query.size(-2) == key.size(-2) and (query.size(1) == key.size(1) or call.enable_gqa)


class _Known:
    """Masks that were looked at, each with the tensor that it is a view of."""

    def __init__(self) -> None:
        from torch.utils.weak import WeakIdKeyDictionary

        self._of: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def look_at(self, tensor: Tensor) -> Recognised:
        from flatout.blocks.kernels.attention.recognition import recognised

        if tensor.is_inference():  # torch does not count its changes
            return recognised(tensor)
        owner = tensor._base if tensor._base is not None else tensor
        now = (tensor._version, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
        structures: dict[object, Recognised] = self._of.setdefault(owner, {})
        if now not in structures:
            structures[now] = recognised(tensor)
        return structures[now]


def edit(text: str, parameters: Parameters) -> str:
    """Write `is_causal=True` for `attn_mask=mask`, or leave the mask out.

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


LEVER = lever(__name__, propose, apply=apply, edit=edit, title="Pairs that a mask hides are skipped")
