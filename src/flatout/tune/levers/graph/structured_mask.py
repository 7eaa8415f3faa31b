"""Attention under a mask that is written out pair by pair skips the pairs that the mask hides.

What        `scaled_dot_product_attention(..., attn_mask=mask)`, where the values of the mask are a structure (nothing hidden,
            causal, a window, documents) or let only few pairs through: `is_causal=True`, no mask, or `flatout.attention` with the
            structure. Each mask is looked at once, and again after it has changed. Compiled graphs end before such a call, and go
            on after it; with `nested_breaks` they do so where the call stands, and not around all functions that it is within.
Guarantee   BOUNDED: the same sums over the pairs that are seen, in another order.
Refuses     Biases, padding, masks in which a query sees nothing; dropout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Final

from flatout.core.errors import EditError, LeverRefused, PlanError
from flatout.core.parts import lever
from flatout.core.records.evidence import Evidence
from flatout.core.records.finding import Finding
from flatout.core.records.lever import Candidate, Hooks, Parameters, string
from flatout.core.runtime.patches import set_attributes
from flatout.machine.cost.accounting import facts_named, milliseconds, operator_seconds, operators_at
from flatout.tune.rewrite.calls import argument, call_in, with_argument, without_argument
from flatout.tune.rewrite.source import expression, readable_place, with_expression

if TYPE_CHECKING:
    from torch import Tensor

    from flatout.blocks.kernels.attention.recognition import Recognised

_SPARSE: Final = {"documents", "window", "sparse"}
_FLAGS: Final = {"causal", "all-true"}
_CALL: Final = ("torch.nn.functional.scaled_dot_product_attention",)
_POSITION: Final = 3
_NESTED: Final = 0.99
"""The part of the lever's promise with which fewer pieces of graphs are tried behind all others, once the model is compiled."""


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
    if evidence.workload.device != "cpu" and not parameters and _can_nest():
        nested: Parameters = {"nested_breaks": True}
        because = f"{because}; graphs that end at attention are cut into fewer pieces"
        yield Candidate(parameters=nested, saved_s=(_NESTED * least_s, _NESTED * best_s), where=where, because=because)


def _can_nest() -> bool:
    """Whether Dynamo of this torch lets graphs end inside of functions (2.9 and later, not by default)."""
    return hasattr(import_module("torch._dynamo.config"), "nested_graph_breaks")


def _nest_breaks() -> Callable[[], None]:
    """Let compiled graphs end inside of functions; returns how to undo it."""
    return set_attributes(import_module("torch._dynamo.config"), nested_graph_breaks=True)


def apply(hooks: Hooks, parameters: Parameters) -> None:
    """Look at the mask before each call of torch's function, and use its structure."""
    import torch
    from torch.nn import functional as F

    from flatout.blocks.kernels.attention.api import attention
    from flatout.core.errors import NotFused
    from flatout.core.runtime.patches import AttentionCall, attention_function

    if parameters.get("nested_breaks"):
        if not _can_nest():
            raise PlanError("Dynamo of this torch has no nested_graph_breaks: leave 'nested_breaks' out of the plan")
        hooks.at_start(_nest_breaks)
    original = F.scaled_dot_product_attention
    known = _Known()

    def with_structure(call: AttentionCall) -> Tensor:
        is_plain = call.query.dim() == 4 and not call.dropout_p and not call.is_causal
        if not is_plain or call.attn_mask is None:
            return call.run(original)
        # between compiled graphs: a structure is read from the mask's values, which a graph has not got
        return outside_graphs(call) if torch.compiler.is_compiling() else with_mask(call)

    def with_mask(call: AttentionCall) -> Tensor:
        query, key, value = call.query, call.key, call.value
        assert call.attn_mask is not None
        found = known.look_at(call.attn_mask, (query.size(-2), key.size(-2)))
        if found is None or found.mask is None:
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


class _Known:
    """Masks that were looked at, each with the tensor that it is a view of."""

    def __init__(self) -> None:
        from torch.utils.weak import WeakIdKeyDictionary

        self._of: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def look_at(self, tensor: Tensor, pairs: tuple[int, int]) -> Recognised | None:
        """None for what is not a mask of these numbers of queries and keys."""
        from flatout.blocks.kernels.attention.recognition import recognised

        if tensor.requires_grad or not 2 <= tensor.dim() <= 4 or tensor.shape[-2:] != pairs:
            return None
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
