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
from weakref import WeakKeyDictionary

from flatout.records.evidence import Evidence
from flatout.records.finding import Finding
from flatout.records.lever import Candidate, Lever, Parameters, Refusal, Seams, string

if TYPE_CHECKING:
    from torch import Tensor, nn

_KEPT: Final = 4
"""Results kept of one module: pairs and triples of inputs that are taken in turn are met."""
_PLAIN: Final = (int, float, complex, str, bytes, type(None))


def propose(evidence: Evidence, findings: Sequence[Finding]) -> Iterator[Candidate | Refusal]:
    """For each module that was found to be run twice on one input."""
    if not findings:
        yield Refusal(lever=LEVER.id, because="no module is run twice on the same input")
    seen = set()
    for finding in findings:
        if not finding.module or finding.module in seen:
            continue
        seen.add(finding.module)
        low, high = finding.saved_s
        yield Candidate(
            lever=LEVER.id,
            parameters={"module": finding.module},
            saved_s=(0.6 * low, 1.1 * high),
            where=finding.where,
            because=finding.because,
        )


def apply(seams: Seams, parameters: Parameters) -> None:
    """Have the module's class look for a kept result first; `module` is the root module's class and the path inside it."""
    import torch

    root, _, path = string(parameters, "module").partition(".")
    root = root.partition(" (")[0]
    known: WeakKeyDictionary[nn.Module, Results] = WeakKeyDictionary()
    changed: set[type] = set()
    is_compiling = torch.compiler.is_dynamo_compiling
    writes = _Writes()
    seams.replace(torch.Tensor, "data", writes.watching(torch.Tensor.data))

    def keep(module: nn.Module) -> Callable[[], None] | None:
        if type(module).__name__ != root:
            return None
        try:
            inner = module.get_submodule(path)
        except AttributeError:
            return None
        if inner in known:
            return None
        known[inner] = Results(inner, writes, lambda: seams.note(LEVER.id))
        if type(inner) not in changed:
            changed.add(type(inner))
            seams.replace(type(inner), "forward", _looking(type(inner).forward, known, is_compiling))

        def forget() -> None:
            known.pop(inner, None)

        return forget

    seams.at_first_call(keep)


def _looking(
    original: Callable[..., Any], known: WeakKeyDictionary[nn.Module, Results], is_compiling: Callable[[], bool]
) -> Callable[..., Any]:
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if is_compiling():
            return original(self, *args, **kwargs)
        results = known.get(self)
        if results is None:
            return original(self, *args, **kwargs)
        return results.call(original, args, kwargs)

    return forward


class Results:
    """The last results of one module, and what they were made of."""

    def __init__(self, module: nn.Module, writes: _Writes, on_reuse: Callable[[], None]) -> None:
        import weakref

        self._writes = writes

        self._module = weakref.ref(module)  # a value of a weak dictionary must not hold its key
        self._on_reuse = on_reuse
        self._kept: list[_Result] = []
        self._state: tuple[object, ...] = ()
        self._unable: set[bool] = set()
        self._parts = list(module.modules())

    def call(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A kept result, or that of the module."""
        import torch

        module = self._module()
        assert module is not None
        inputs = _Inputs.of((args, kwargs))
        if inputs is None or module.training in self._unable or any(_has_hooks(m) for m in self._parts):
            return original(module, *args, **kwargs)
        state = self._now(module)
        if state != self._state:
            self._kept.clear()
            self._parts = list(module.modules())
            state = self._state = self._now(module)
        is_grad = torch.is_grad_enabled()
        for result in self._kept:
            if result.serves(inputs, is_grad=is_grad):
                self._on_reuse()
                return result.handed_out(is_grad=is_grad)
        del self._kept[: len(self._kept) + 1 - _KEPT]
        kept_inputs = inputs.kept()
        random = _random_state()
        output = original(module, *args, **kwargs)
        if self._now(module) != state or _random_state() != random:
            self._unable.add(module.training)
            self._kept.clear()
        elif (new := _Result.of(kept_inputs, output, is_grad=is_grad)) is not None:
            self._kept.append(new)
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
    def of(given: object) -> _Inputs | None:
        """None where there is no tensor, or something whose contents cannot be told."""
        tensors: list[Tensor] = []
        shape = _shape(given, tensors)
        if shape is None or not tensors or any(t.is_inference() or t.is_sparse for t in tensors):
            return None
        return _Inputs(shape, tensors)

    def kept(self) -> _Inputs:
        """The same with copies of tensors without a graph: memory that is shared with NumPy changes without a version."""
        self._copies = [None if t.requires_grad else t.detach().clone() for t in self._tensors]
        return self

    def are(self, other: _Inputs) -> bool:
        """Whether these, which were kept, are the others now."""
        return self._shape == other._shape and all(
            map(_is_same, self._tensors, self._versions, self._copies, other._tensors)
        )


def _is_same(kept: Tensor, version: int, copy: Tensor | None, now: Tensor) -> bool:
    import torch

    if copy is None:
        return kept is now and now._version == version
    if now.requires_grad or copy.dtype != now.dtype or copy.device != now.device or copy.shape != now.shape:
        return False
    if kept is now and now._version == version and now.is_cuda:
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


class _Result:
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
    def of(inputs: _Inputs, output: object, *, is_grad: bool) -> _Result | None:
        """None where it cannot be told whether anybody changes it."""
        tensors: list[Tensor] = []
        if _shape(output, tensors) is None or any(t.is_inference() or t.is_sparse for t in tensors):
            return None
        return _Result(inputs, output, tensors, is_grad=is_grad)

    def serves(self, inputs: _Inputs, *, is_grad: bool) -> bool:
        """Whether it is the result of a call on these inputs."""
        if is_grad and (not self._is_grad or self._is_used_up):
            return False
        if any(t._version != version for t, version in zip(self._tensors, self._versions, strict=True)):
            return False
        return self._inputs.are(inputs)

    def handed_out(self, *, is_grad: bool) -> Any:
        """The output in containers of its own; without its graph where gradients are off."""
        return _rebuilt(self._output, is_grad=is_grad)

    def use_up(self) -> None:
        """A backward has gone through its graph, which is freed."""
        self._is_used_up = True


def _using_up(result: _Result) -> Callable[..., None]:
    import weakref

    held = weakref.ref(result)  # the graph must not hold what holds the graph

    def use_up(*_: object) -> None:
        if (now := held()) is not None:
            now.use_up()

    return use_up


def _rebuilt(value: Any, *, is_grad: bool) -> Any:
    from torch import Tensor

    if isinstance(value, Tensor):
        return value if is_grad else value.detach()
    if isinstance(value, (tuple, list)):
        return type(value)(_rebuilt(item, is_grad=is_grad) for item in value)
    if isinstance(value, dict):
        return {name: _rebuilt(item, is_grad=is_grad) for name, item in value.items()}
    return value


def _has_hooks(module: nn.Module) -> bool:
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


def _random_state() -> tuple[object, ...]:
    """Where the generators stand that a module may draw from."""
    import random
    import sys

    import torch

    states: list[object] = [torch.get_rng_state().numpy().tobytes(), random.getstate()]
    if "numpy" in sys.modules:
        kind, keys, *rest = sys.modules["numpy"].random.get_state()
        states += [kind, keys.tobytes(), *rest]
    if torch.cuda.is_initialized():
        states += [torch.cuda.get_rng_state(i).numpy().tobytes() for i in range(torch.cuda.device_count())]
    return tuple(states)


LEVER = Lever(
    id="graph.reuse-result",
    title="A repeated call's result reused",
    guarantee="bounded",
    module=__name__,
    propose=propose,
    apply=apply,
)
