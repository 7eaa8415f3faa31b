"""Calls of modules: which root modules run, from which line, whether their graphs are used, and where inside them we are."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from itertools import count, islice
from threading import get_ident
from time import perf_counter
from typing import Any, Final, Literal, Protocol

import msgspec
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from flatout.core.records.evidence import RepeatedModule
from flatout.core.runtime.patches import Patches, Undo
from flatout.core.runtime.source_sites import Sites
from flatout.core.tensors.nests import map_tensors, tensors_in

_CAPTURE_LIMIT_BYTES: Final = 256 << 20
_CALLERS: Final = 4
_MOST_MODULES: Final = 32
_LARGEST_MODULE: Final = 100_000_000
_CELLS: Final[tuple[Literal["GRUCell", "LSTMCell", "RNNCell"], ...]] = ("GRUCell", "LSTMCell", "RNNCell")
_COMPARED_ELEMENTS: Final = 1 << 20
_GRAPHS_FOLLOWED: Final = 64
"""Calls per line whose graph is followed to see whether a backward uses it."""
_OUTPUTS_FOLLOWED: Final = 64
"""Tensors of one output; a language model that returns its hidden states has one for each layer."""
_WRAPPERS: Final = {
    "_FabricModule": "_forward_module",
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
    "OptimizedModule": "_orig_mod",
}
"""Classes that a framework puts around the user's module, and the name under which it lies in them."""


class RootListener(Protocol):
    """Hears of root calls, on the observed thread: of the call, its inputs, the start, the output, the end."""

    def on_root_call(self, root: RootModule) -> None: ...

    def on_root_start(self, root: RootModule) -> None: ...

    def on_root_end(self, root: RootModule) -> None: ...

    def on_root_inputs(self, root: RootModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None: ...

    def on_root_output(self, root: RootModule, output: Any) -> None: ...

    def on_inner_start(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object: ...

    def on_inner_end(self, token: object, output: Any) -> None: ...

    def on_counted_call(self) -> None: ...

    def fail(self, error: Exception) -> None: ...


class Captured:
    """Inputs of one root call, copied, with the autocast state it ran under."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, grad_enabled: bool) -> None:
        self.args = map_tensors(args, _copy)
        self.kwargs = map_tensors(kwargs, _copy)
        self.grad_enabled = grad_enabled
        self.autocast = {
            device: torch.get_autocast_dtype(device) for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)
        }


class Mean:
    """The mean of what was added, 0 of nothing."""

    def __init__(self) -> None:
        self._total = 0.0
        self._num = 0

    def add(self, value: float) -> None:
        """Take one more into the mean."""
        self._total += value
        self._num += 1

    @property
    def mean(self) -> float:
        """The mean of the values added so far, 0 of none."""
        return self._total / self._num if self._num else 0.0


class RootModule:
    """One root module called from one line, through one sequence of callers."""

    def __init__(self, module: nn.Module, lines: tuple[int, ...], name: str) -> None:
        self.module = weakref.ref(module)
        self.strong_ref: nn.Module | None = None
        """Kept alive for trials after the script's own references are gone; a few modules of ordinary size only."""
        self.name = name
        """The class of the user's module, numbered where other modules of that class are root modules too."""
        self.site = lines[0] if lines else -1
        self.callers = lines[1:]
        self.is_training = module.training
        self.grad_enabled = torch.is_grad_enabled()
        self.num_modules = sum(1 for _ in module.modules())
        self.num_parameters = sum(p.numel() for p in module.parameters())
        self.has_parameters = self.num_parameters > 0
        self.calls = 0
        self.weighted_calls = 0
        """Calls, each as often as the watched step it was in stands for steps."""
        self._usual_s = Mean()
        self._deep_s = Mean()
        self._num_of_size: dict[int, int] = {}
        self._captures: dict[int, Captured] = {}
        """Copied inputs and the number of calls, by the bits of the first input's number of elements."""
        self.graphs_built = 0
        self.graphs_used = 0
        self.last_input: Tensor | None = None
        self.num_compared = 0
        self.num_prefix = 0

    @property
    def alive(self) -> nn.Module | None:
        """The module, while it is there. Not by its truth: a container may be empty, a compiled module has no length."""
        return self.strong_ref if self.strong_ref is not None else self.module()

    @property
    def call_s(self) -> float:
        """Mean seconds of a call; those that were looked at closely count only where there are no others."""
        return self._usual_s.mean or self._deep_s.mean

    @property
    def total_s(self) -> float:
        """Seconds of all calls, as long as they usually are."""
        return self.call_s * self.calls

    def note_duration(self, seconds: float, *, is_usual: bool) -> None:
        """A call took so long."""
        (self._usual_s if is_usual else self._deep_s).add(seconds)

    @property
    def captured(self) -> Captured | None:
        """The captured inputs that stand for most of the work: of sizes like half of it, where sequences grow or differ."""
        weights = sorted((bits, num << bits) for bits, num in self._num_of_size.items() if bits in self._captures)
        total = sum(weight for _, weight in weights)
        reached = 0
        for bits, weight in weights:
            reached += weight
            if 2 * reached >= total:
                return self._captures[bits]
        return None

    def capture(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Copy the inputs, where none within a factor of two of their size were copied before."""
        bits = args[0].numel().bit_length() if args and isinstance(args[0], Tensor) else 0
        num = self._num_of_size[bits] = self._num_of_size.get(bits, 0) + 1
        if num > 1 or not self.has_parameters:
            return
        if sum(t.numel() * t.element_size() for t in tensors_in((args, kwargs))) <= _CAPTURE_LIMIT_BYTES:
            self._captures[bits] = Captured(args, kwargs, grad_enabled=self.grad_enabled)

    @property
    def captured_length(self) -> int:
        """Positions of the first captured input."""
        first = next(tensors_in((self.captured.args, self.captured.kwargs)), None) if self.captured else None
        return first.shape[1] if first is not None and first.dim() >= 2 else 0

    def compare_with_last(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note whether this call's first input is the last one's with more behind it, and keep a copy for the next."""
        first = next(tensors_in((args, kwargs)), None)
        if first is None or is_wrapper(first) or first.dim() < 2 or first.numel() > _COMPARED_ELEMENTS:
            return
        last, self.last_input = self.last_input, first.detach().clone()
        if last is not None and last.dim() == first.dim() and last.dtype == first.dtype:
            self.num_compared += 1
            grew = first.shape[0] == last.shape[0] and first.shape[1] > last.shape[1] > 0
            if grew and first.shape[2:] == last.shape[2:]:
                self.num_prefix += int(torch.equal(first[:, : last.shape[1]], last))

    def use_graph(self, *_: object) -> None:
        """Told by autograd that a backward reached the output of a call."""
        self.graphs_used += 1


class ModuleCalls:
    """Watches `nn.Module.__call__`: root calls always, the path inside them only while `is_deep`."""

    def __init__(self, sites: Sites, listener: RootListener) -> None:
        self.roots: dict[tuple[int, tuple[int, ...]], RootModule] = {}
        self.is_active = False
        self.is_deep = False
        self.is_fetching = False
        """Whether a loader prepares a batch: modules that run there (transforms) are its work, no forward of the step."""
        self.path = ""
        self.counted: nn.Module | None = None
        """The module whose calls end steps, while nothing else is watched."""
        self.weight = 1
        self.cells: dict[int, RepeatedModule] = {}
        self._inside = False
        self._names: dict[int, str] = {}
        self._titles: dict[int, tuple[weakref.ref[nn.Module], str]] = {}
        self._named_roots: set[int] = set()
        self._sites = sites
        self._listener = listener
        self._thread_id = get_ident()
        self._patches = Patches()
        self._watch_again: Undo | None = None

    def tensors(self) -> Iterator[Tensor]:
        """Parameters of the root modules, and the inputs that were captured of their calls."""
        for root in self.roots.values():
            module = root.alive
            yield from module.parameters() if module is not None else ()
            yield from tensors_in((root.captured.args, root.captured.kwargs)) if root.captured is not None else ()

    def install(self, patches: Patches) -> None:
        """Replace `nn.Module.__call__` by a wrapper that costs 0.3 us inside a root call."""
        original: Callable[..., Any] = nn.Module.__call__
        watch = self
        is_compiling = torch.compiler.is_dynamo_compiling  # dynamo folds it, so that no guard looks at our own state

        def __call__(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if watch.counted is self and not is_compiling() and get_ident() == watch._thread_id:
                watch._listener.on_counted_call()
            if not watch.is_active or (watch._inside and not watch.is_deep) or is_compiling():
                return original(self, *args, **kwargs)
            if get_ident() != watch._thread_id:
                return original(self, *args, **kwargs)
            if watch._inside:
                return watch._inner(original, self, args, kwargs)
            if watch.is_fetching:
                return original(self, *args, **kwargs)
            return watch._root(original, self, args, kwargs)

        patches.set(nn.Module, "__call__", __call__)
        self._patches = patches

    @property
    def num_calls(self) -> int:
        """Calls of modules since the beginning, those inside root modules too, where a forward calls each of them once."""
        return sum(root.calls * root.num_modules for root in self.roots.values())

    def leave_alone(self, is_wanted: bool) -> None:
        """Put torch's own `nn.Module.__call__` back for a while, or ours again, unless something else has replaced it since."""
        if is_wanted:
            self._watch_again = self._patches.lift(nn.Module, "__call__")
        elif self._watch_again is not None:
            self._watch_again()
            self._watch_again = None

    def begin_deep(self) -> None:
        """Forget the names and cells of the deep step before."""
        self._names.clear()
        self._named_roots.clear()
        self.cells.clear()

    def module_path(self) -> str:
        """Dotted path of the module now running, '' outside any."""
        return self.path

    def _root(
        self, original: Callable[..., Any], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        root = self._enter(module, args, kwargs)
        is_usual = not self.is_deep and root.calls > 1  # a first call may compile, allocate, make lazy parameters
        self._inside = True
        start = perf_counter()
        try:
            output = original(module, *args, **kwargs)
        finally:
            self._inside = False
            self.path = ""
            root.note_duration(perf_counter() - start, is_usual=is_usual)
            self._listener.on_root_end(root)
        if self.is_deep:
            self._listener.on_root_output(root, output)
        if torch.is_grad_enabled():
            self._follow_graph(root, output)
        return output

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> RootModule:
        key = (id(module), self._sites.chain(sys._getframe(3), deepest=_CALLERS))
        root = self.roots.get(key)
        if root is None or root.module() is not module:
            root = self.roots[key] = RootModule(module, key[1], self._title(module))
            if len(self.roots) <= _MOST_MODULES and root.num_parameters <= _LARGEST_MODULE:
                root.strong_ref = without_replication(module)
        root.calls += 1
        root.is_training = module.training
        root.grad_enabled = torch.is_grad_enabled()
        self._listener.on_root_call(root)
        root.weighted_calls += self.weight  # of the step that begins with this call, where it is one of inference
        try:
            if root.calls >= 2 and not self.is_deep:
                root.capture(args, kwargs)
            self._listener.on_root_inputs(root, args, kwargs)
            if self.is_deep:
                self._name(module, root.name)
                self.path = self._names.get(id(module), root.name)
        except Exception as e:  # noqa: BLE001  # ours, not the user's: give up observing, let the script go on
            self._listener.fail(e)
        self._listener.on_root_start(root)
        return root

    def _inner(
        self, original: Callable[..., Any], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        before = self.path
        self.path = self._names.get(id(module), before)
        if isinstance(module, nn.RNNCellBase):
            self._note_cell(module, args)
        try:
            token = self._listener.on_inner_start(module, args, kwargs)
            output = original(module, *args, **kwargs)
            if token is not None:
                self._listener.on_inner_end(token, output)
            return output
        finally:
            self.path = before

    def _note_cell(self, module: nn.RNNCellBase, args: tuple[Any, ...]) -> None:
        cell = self.cells.get(id(module))
        if cell is None:
            batch = args[0].shape[0] if args and isinstance(args[0], Tensor) and args[0].dim() == 2 else 1
            cell = RepeatedModule(
                kind=next(kind for kind in _CELLS if isinstance(module, getattr(nn, kind))),
                module=self.path,
                source=self._sites.of_frame(sys._getframe(3)),
                calls=0,
                batch=batch,
                input_size=module.input_size,
                hidden_size=module.hidden_size,
                operators=(),
            )
        self.cells[id(module)] = msgspec.structs.replace(cell, calls=cell.calls + 1)

    def _title(self, module: nn.Module) -> str:
        """A name for a root module that no other living one has: a teacher and the student that is a copy of it differ."""
        user = wrapped(module)
        kind = type(user).__name__
        self._titles = {key: known for key, known in self._titles.items() if known[0]() is not None}
        if id(user) not in self._titles:
            taken = {name for _, name in self._titles.values()}
            numbered = (f"{kind} ({number})" for number in count(2))
            name = kind if kind not in taken else next(name for name in numbered if name not in taken)
            self._titles[id(user)] = (weakref.ref(user), name)
        return self._titles[id(user)][1]

    def _name(self, module: nn.Module, title: str) -> None:
        if id(module) not in self._named_roots:
            self._named_roots.add(id(module))
            for path, inner in module_paths(module, title):
                self._names[id(inner)] = path

    def _follow_graph(self, root: RootModule, output: Any) -> None:
        if root.graphs_built >= _GRAPHS_FOLLOWED:
            return
        # A loss may take any of the outputs: the hidden states and not the logits, say.
        outputs = islice(tensors_in(output), _OUTPUTS_FOLLOWED)
        nodes = {id(t.grad_fn): t.grad_fn for t in outputs if t.grad_fn is not None}
        if nodes:
            root.graphs_built += 1
            use = _once(root.use_graph)
            for node in nodes.values():
                node.register_prehook(use)


def _once(action: Callable[..., None]) -> Callable[..., None]:
    """A function that calls `action` the first time, and does nothing from then on."""
    called = False

    def first(*args: object) -> None:
        nonlocal called
        if not called:
            called = True
            action(*args)

    return first


def wrapped(module: nn.Module) -> nn.Module:
    """The user's module inside what a framework put around it."""
    while (name := _WRAPPERS.get(type(module).__name__)) is not None:
        inner = module._modules.get(name)
        if inner is None:
            break
        module = inner
    return module


def module_paths(module: nn.Module, top: str) -> Iterator[tuple[str, nn.Module]]:
    """Dotted paths of the user's modules in a root module, from the name of the outermost one; wrappers have its path."""
    user = wrapped(module)
    while module is not user:
        yield top, module
        module = module._modules[_WRAPPERS[type(module).__name__]]  # type: ignore[assignment]
    for name, inner in user.named_modules():
        yield (f"{top}.{name}" if name else top), inner


def without_replication(module: nn.Module) -> nn.Module:
    """The module that a DistributedDataParallel wraps: a copy of it computes the same and talks to nobody."""
    inner = getattr(module, "module", None)
    return inner if isinstance(module, nn.parallel.DistributedDataParallel) and isinstance(inner, nn.Module) else module


def is_wrapper(tensor: Tensor) -> bool:
    """Whether other tensors, perhaps on other ranks, stand behind this one (DTensor): reading its values may communicate."""
    return type(tensor) not in (Tensor, nn.Parameter) and is_traceable_wrapper_subclass(tensor)


def _copy(tensor: Tensor) -> Tensor:
    copy = tensor.detach().clone()
    return copy.requires_grad_(tensor.requires_grad) if tensor.is_floating_point() else copy
