"""Models compute in float32 instead of a precision that nobody chose (float64) or that the processor has no units for.

What        At its first call a model's parameters and buffers are brought to float32, its inputs at each call; autocast is off.
            Random numbers drawn outside stay what they are. What comes out of a float64 model is float64 again for what follows.
Guarantee   BOUNDED at float32: judged by the rounding that float32 has.
Refuses     Runs whose rules found neither accidental float64 nor half precision without units.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Final

import libcst as cst

from flatout.core.errors import EditError, LeverRefused
from flatout.core.parts import lever
from flatout.core.records.evidence import Evidence
from flatout.core.records.finding import Finding
from flatout.core.records.lever import Candidate, Hooks, Parameters
from flatout.tune.rewrite.calls import with_calls
from flatout.tune.rewrite.imports import call_name
from flatout.tune.rewrite.source import find, nodes_of, readable_place, with_changes

if TYPE_CHECKING:
    from torch import Tensor, nn

_HIGH: Final = 1.2
_LOW: Final = 0.4
"""The trial has the operators alone; casts at the model's border come to it, and less memory traffic beside it goes."""
_DOUBLE: Final = ("torch.float64", "torch.double")
_FROM_NUMPY: Final = ("torch.from_numpy", "torch.as_tensor", "torch.tensor")


def propose(evidence: Evidence, findings: Sequence[Finding]) -> Iterator[Candidate]:
    """Propose it where a rule found float64 that costs time and that nobody asked for."""
    if not findings:
        raise LeverRefused("no model computes in float64, or in half precision without units for it")
    best = max(findings, key=lambda f: f.saved_s[1])
    yield Candidate(
        parameters=_places(evidence, best),
        saved_s=(_LOW * best.saved_s[0], _HIGH * best.saved_s[1]),
        where=best.where,
        because=best.because,
    )


def _places(evidence: Evidence, finding: Finding) -> Parameters:
    """The lines that brought float64 in, all of one file: 'function: code' each."""
    settings = [s.source for s in evidence.workload.settings if "64" in s.value and s.source is not None]
    lines = [finding.where, *settings, *map(evidence.source_of, evidence.float64_sources)]
    found = [place for line in lines if (place := readable_place(evidence, line))]
    if not found:
        return {}
    file = found[0]["file"]
    places = dict.fromkeys(f"{p['function']}: {p['code']}" for p in found if p["file"] == file)
    return {"file": file, "places": tuple(places)}


def apply(hooks: Hooks, parameters: Parameters) -> None:
    """Convert models in place, and their inputs."""
    import torch

    from flatout.core.tensors.nests import map_tensors

    def convert(module: nn.Module) -> Callable[[], None] | None:
        parameters = [(p, p.dtype) for p in module.parameters() if _is_other_float(p)]
        owned = [(o, n, b) for o in module.modules() for n, b in o.named_buffers(recurse=False)]
        buffers = [(owner, name, b.dtype) for owner, name, b in owned if _is_other_float(b)]
        if not parameters and not buffers:
            return None
        was_double = any(dtype == torch.float64 for _, dtype in parameters)
        module.float()
        hooks.note(LEVER.id)
        handle = module.register_forward_hook(_as_double) if was_double else None

        def undo() -> None:
            if handle is not None:
                handle.remove()
            for tensor, dtype in parameters:
                tensor.data = tensor.data.to(dtype)
            for owner, name, dtype in buffers:  # conversion puts others in their stead
                setattr(owner, name, getattr(owner, name).to(dtype))

        return undo

    def cast(module: Any, inputs: Any) -> Any:
        args, kwargs = inputs
        return map_tensors(args, _as_float32), map_tensors(kwargs, _as_float32)

    def plain(module: nn.Module) -> AbstractContextManager[object] | None:
        stack = ExitStack()
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
                hooks.note(LEVER.id)
        if torch.get_default_dtype() == torch.float64:
            stack.enter_context(_float32_creation())
        return stack

    hooks.at_first_call(convert)
    hooks.on_inputs(cast)
    hooks.around_calls(plain)


def _is_other_float(tensor: Tensor) -> bool:
    import torch

    return tensor.is_floating_point() and tensor.dtype != torch.float32


def _as_float32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.is_floating_point() else tensor


def _as_double(module: nn.Module, args: object, output: Any) -> Any:
    """What follows the model has been given float64 before."""
    from flatout.core.tensors.nests import map_tensors

    return map_tensors(output, lambda t: t.double() if t.is_floating_point() else t)


@contextmanager
def _float32_creation() -> Iterator[None]:
    """Tensors that the model makes for itself are float32, too."""
    import torch

    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def edit(text: str, parameters: Parameters) -> str:
    """Leave `.double()` out, and write `.float()` behind what comes from NumPy.

    Raises EditError where a place does not plainly bring float64 in.
    """
    places = parameters.get("places")
    if not isinstance(places, tuple) or not places:
        raise EditError("the place where the precision comes in was not found")
    for place in places:
        function, _, code = place.partition(": ")
        text = _narrowed(text, {"function": function, "code": code})
    return text


def _narrowed(text: str, parameters: Parameters) -> str:
    place = find(text, parameters)
    module, statement = place.module, place.statement
    calls = nodes_of(cst.Call, statement)
    switches = [c for c in calls if call_name(module, c.func) == "torch.set_default_dtype"]
    if switches and len(calls) == len(switches):
        return with_changes(module, {statement: []}).code
    widening = [c for c in calls if _widens(module, c)]
    if widening:
        return with_changes(module, dict.fromkeys(widening, lambda call: call.func.value)).code
    doubles = [c for c in calls if _double_of(module, c) is not None]
    if doubles:
        return with_calls(module, doubles, _as_single).code
    arrays = [c for c in calls if call_name(module, c.func) in _FROM_NUMPY]
    if len(arrays) != 1:
        raise EditError(f"'{parameters['code']}' does not plainly bring float64 in")
    return with_changes(module, {arrays[0]: lambda call: cst.Call(cst.Attribute(call, cst.Name("float")))}).code


def _widens(module: cst.Module, call: cst.Call) -> bool:
    """`x.double()`, `x.to(torch.float64)`."""
    if not isinstance(call.func, cst.Attribute):
        return False
    if call.func.attr.value == "double":
        return not call.args
    return call.func.attr.value == "to" and len(call.args) == 1 and _is_double(module, call.args[0].value)


def _is_double(module: cst.Module, node: cst.CSTNode) -> bool:
    return call_name(module, node) in _DOUBLE


def _double_of(module: cst.Module, call: cst.Call) -> cst.Arg | None:
    """`dtype=torch.float64` of a call."""
    named = (a for a in call.args if a.keyword is not None and a.keyword.value == "dtype")
    return next((a for a in named if _is_double(module, a.value)), None)


def _as_single(call: cst.Call) -> cst.Call:
    """The call with `torch.float32` in place of float64."""

    def narrowed(arg: cst.Arg) -> cst.Arg:
        is_dtype = arg.keyword is not None and arg.keyword.value == "dtype" and isinstance(arg.value, cst.Attribute)
        value = arg.value.with_changes(attr=cst.Name("float32")) if is_dtype else arg.value
        return arg.with_changes(value=value)

    return call.with_changes(args=[narrowed(a) for a in call.args])


LEVER = lever(
    __name__,
    propose,
    apply=apply,
    edit=edit,
    dtype=lambda parameters: "float32",
    title="Float32 instead of what nobody chose",
)
