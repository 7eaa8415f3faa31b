"""A module that is called again on what it was given before hands out the result of that call.

What        The forward of one module keeps its last results. A call on equal inputs, with weights and buffers that nobody wrote
            to, returns the kept one: with its graph, or detached where gradients are off.
Guarantee   BOUNDED: the same values; gradients of both uses are added before they go back through the module, not after.
Refuses     Modules that draw random numbers or write to their buffers (dropout, batch norm in training), that have hooks, or
            whose inputs or outputs are not made of tensors and plain values: those run as before. Graphs that a backward used up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

from flatout.core.errors import LeverRefused
from flatout.core.parts import lever
from flatout.core.records.evidence import Evidence
from flatout.core.records.finding import Finding
from flatout.core.records.lever import Candidate, Hooks, Parameters, string
from flatout.tune.levers.submodules import answer_calls

if TYPE_CHECKING:
    from torch import Tensor, nn

_MOST_RESULTS: Final = 4
"""Results kept of one module: pairs and triples of inputs that are taken in turn are met."""
_PLAIN: Final = (int, float, complex, str, bytes, type(None))


def propose(evidence: Evidence, findings: Sequence[Finding]) -> Iterator[Candidate]:
    """Propose it for each module that was found to run twice on one input."""
    if not findings:
        raise LeverRefused("no module is run twice on the same input")
    proposed = set()
    for finding in findings:
        if not finding.module or finding.module in proposed:
            continue
        proposed.add(finding.module)
        low, high = finding.saved_s
        yield Candidate(
            parameters={"module": finding.module},
            saved_s=(0.6 * low, 1.1 * high),
            where=finding.where,
            because=finding.because,
        )


def apply(hooks: Hooks, parameters: Parameters) -> None:
    """Have the module's class look for a cached result first; `module` is the root module's class and the path inside
    it.
    """
    import torch

    writes = _Writes()
    hooks.replace(torch.Tensor, "data", writes.watching(torch.Tensor.data))
    answer_calls(
        hooks,
        string(parameters, "module"),
        lambda module: ModuleResults(module, writes, lambda: hooks.note(LEVER.id)).call,
    )


class ModuleResults:
    """The last results of one module, with the inputs and the state that they were computed from."""

    def __init__(self, module: nn.Module, writes: _Writes, on_reuse: Callable[[], None]) -> None:
        self._writes = writes
        self._on_reuse = on_reuse
        self._results: list[_ModuleResult] = []
        self._state: tuple[object, ...] = ()
        self._unable: set[bool] = set()
        self._parts = list(module.modules())

    def call(
        self, original: Callable[..., Any], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """A kept result, or that of the module."""
        import torch

        from flatout.core.tensors.generators import generator_states

        inputs = _Inputs.of((args, kwargs))
        if inputs is None or module.training in self._unable or any(_has_hooks(m) for m in self._parts):
            return original(module, *args, **kwargs)
        state = self._now(module)
        if state != self._state:
            self._results.clear()
            self._parts = list(module.modules())
            state = self._state = self._now(module)
        is_grad = torch.is_grad_enabled()
        for result in self._results:
            if result.serves(inputs, is_grad=is_grad):
                self._on_reuse()
                return result.handed_out(is_grad=is_grad)
        del self._results[: len(self._results) + 1 - _MOST_RESULTS]
        cached_inputs = inputs.with_copies()
        random = generator_states()
        output = original(module, *args, **kwargs)
        if self._now(module) != state or generator_states() != random:
            self._unable.add(module.training)
            self._results.clear()
        elif (new := _ModuleResult.of(cached_inputs, output, is_grad=is_grad)) is not None:
            self._results.append(new)
        return output

    def _now(self, module: nn.Module) -> tuple[object, ...]:
        """All that the module's result depends on besides its inputs; tensors are held by the module, so identities last."""
        import torch

        state: list[object] = [module.training, torch.is_inference_mode_enabled(), self._writes.num]
        for device in ("cpu", "cuda"):
            state.append(torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device))
        for part in self._parts:
            state.append(tuple(map(id, part._modules.values())))
            for tensor in (*part._parameters.values(), *part._buffers.values()):
                if tensor is not None:
                    version = 0 if tensor.is_inference() else tensor._version
                    state.append((id(tensor), version, tensor.data_ptr(), tensor.requires_grad))
        return tuple(state)


class _Writes:
    """Counts uses of `.data` of parameters: writes through it raise no version."""

    def __init__(self) -> None:
        self.num = 0

    def watching(self, original: Any) -> property:
        """The property in whose stead it stands."""
        from torch import nn

        def read(tensor: Tensor) -> Any:
            self.num += isinstance(tensor, nn.Parameter)
            return original.__get__(tensor)

        def write(tensor: Tensor, value: Any) -> None:
            self.num += isinstance(tensor, nn.Parameter)
            original.__set__(tensor, value)

        return property(read, write)


class _Inputs:
    """What a call was given: plain values and the shape of the nest, tensors, and copies of those that others could write to."""

    def __init__(self, shape: object, tensors: list[Tensor]) -> None:
        self._shape = shape
        self._tensors = tensors
        self._versions = [t._version for t in tensors]
        self._copies: list[Tensor | None] = []

    @staticmethod
    def of(tree: object) -> _Inputs | None:
        """None where there is no tensor, or something whose contents cannot be told."""
        tensors: list[Tensor] = []
        shape = _shape(tree, tensors)
        if shape is None or not tensors or any(t.is_inference() or t.is_sparse for t in tensors):
            return None
        return _Inputs(shape, tensors)

    def with_copies(self) -> _Inputs:
        """The same with copies of tensors without a graph: memory that is shared with NumPy changes without a version."""
        self._copies = [None if t.requires_grad else t.detach().clone() for t in self._tensors]
        return self

    def are(self, other: _Inputs) -> bool:
        """Whether these, which were kept, are the others now."""
        return self._shape == other._shape and all(
            map(_is_same, self._tensors, self._versions, self._copies, other._tensors)
        )


def _is_same(cached: Tensor, version: int, copy: Tensor | None, now: Tensor) -> bool:
    import torch

    if copy is None:
        return cached is now and now._version == version
    if now.requires_grad or copy.dtype != now.dtype or copy.device != now.device or copy.shape != now.shape:
        return False
    if cached is now and now._version == version and now.is_cuda:
        return True  # no array of NumPy shares its memory, and the host need not wait
    return copy.stride() == now.stride() and torch.equal(copy, now)


def _shape(value: object, tensors: list[Tensor]) -> object:
    """A nest of tuples, lists and dicts with its tensors numbered, for comparing; None where something else is in it."""
    from torch import Tensor, nn

    if isinstance(value, Tensor):
        if type(value) not in (Tensor, nn.Parameter):
            return None
        tensors.append(value)
        return ("tensor",)
    if isinstance(value, (bool, *_PLAIN)):
        return (type(value), value)
    if type(value) in (tuple, list):
        inner = [_shape(item, tensors) for item in value]  # type: ignore[attr-defined]
    elif type(value) is dict:
        assert isinstance(value, dict)
        inner = [_shape(item, tensors) for item in value.values()] + [(k,) for k in value]
    else:
        return None
    return None if None in inner else (type(value), *inner)


class _ModuleResult:
    """What a module returned, and for which inputs."""

    def __init__(self, inputs: _Inputs, output: object, tensors: list[Tensor], *, is_grad: bool) -> None:
        self._inputs = inputs
        self._output = output
        self._tensors = tensors
        self._versions = [t._version for t in tensors]
        self._is_grad = is_grad
        self._is_used_up = False
        for tensor in tensors:
            if tensor.grad_fn is not None:
                tensor.grad_fn.register_prehook(_using_up(self))

    @staticmethod
    def of(inputs: _Inputs, output: object, *, is_grad: bool) -> _ModuleResult | None:
        """None where it cannot be told whether anybody changes it."""
        tensors: list[Tensor] = []
        if _shape(output, tensors) is None or any(t.is_inference() or t.is_sparse for t in tensors):
            return None
        return _ModuleResult(inputs, output, tensors, is_grad=is_grad)

    def serves(self, inputs: _Inputs, *, is_grad: bool) -> bool:
        """Whether it is the result of a call on these inputs."""
        if is_grad and (not self._is_grad or self._is_used_up):
            return False
        if any(t._version != version for t, version in zip(self._tensors, self._versions, strict=True)):
            return False
        return self._inputs.are(inputs)

    def handed_out(self, *, is_grad: bool) -> Any:
        """The output in containers of its own; without its graph where gradients are off."""
        from flatout.core.tensors.nests import map_tensors

        return map_tensors(self._output, lambda tensor: tensor if is_grad else tensor.detach())

    def use_up(self) -> None:
        """A backward has gone through its graph, which is freed."""
        self._is_used_up = True


def _using_up(result: _ModuleResult) -> Callable[..., None]:
    import weakref

    live = weakref.ref(result)  # the graph must not hold what holds the graph

    def use_up(*_: object) -> None:
        if (now := live()) is not None:
            now.use_up()

    return use_up


def _has_hooks(module: nn.Module) -> bool:
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


LEVER = lever(__name__, propose, apply=apply, title="A repeated call's result reused")
