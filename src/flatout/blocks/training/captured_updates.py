"""Whole updates, from the forward to the optimizer's step, replayed from one CUDA graph each.

A small model on a fast device waits for its host: an update of a policy of two layers launches some 200 kernels one by one. As
one graph they are one launch. What a graph would do wrong is looked for before one is captured, and at each replay.
"""

from __future__ import annotations

import random
import sys
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from functools import wraps
from types import CodeType, ModuleType
from typing import Any, Final, ParamSpec, Protocol, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from flatout.blocks.training.captured_calls import (
    SCALARS,
    CaptureCall,
    capture_on_device,
    is_capturing,
    storage_key,
    without_autocast_cache,
    without_host_waits,
)
from flatout.blocks.training.update_graph import (
    LearningRate,
    UpdateCall,
    UpdateGraph,
    call_hooks,
    hooks_replaced,
    rates_on_device,
)
from flatout.blocks.training.update_kind import UpdateKind, autocast_type, is_of_kind, takes_rates
from flatout.core.errors import UsageError
from flatout.core.runtime.own_calls import own_calls
from flatout.core.tensors.nests import TreeSpec, tree_flatten, tree_iter, tree_leaves, tree_unflatten

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)
_Rows = tuple[tuple[int, ...], ...]

_CALLS_BEFORE: Final = 3
"""Equal calls that go by before one is captured; the last of them is looked at closely."""
_COMPILED_CALLS: Final = 2
"""Calls of compiled code before it is captured: the first compiles, and finds gradients that are not there yet."""
_FEWEST_REPLAYS: Final = 50
"""Another graph is captured once the one before has been replayed so often, a few times earlier: captures take up to 0.1 s."""
_FREE_CAPTURES: Final = 8
_MOST_GRAPHS: Final = 4
"""Each has memory of its own: that of whole batches, of an epoch's smaller last one, and of two more kinds."""
_MOST_ROUNDS: Final = 64
"""Updates in one graph: more of them gain nothing, and take longer to capture."""
_ERRORS: Final = (RuntimeError, TypeError, ValueError, AttributeError, AssertionError)
"""What a capture may fail with, by torch's own doing or where the function takes a number for granted that is a tensor."""
_UPDATES: Final = "_flatout_captured_updates"


class UpdateFunction(Protocol[P, R_co]):
    """What `captured_update` makes of a function."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co:
        """One update."""

    def each(self, calls: Iterable[tuple[Any, ...]]) -> R_co | None:
        """An update for each tuple of arguments, in their order, and what the last returns; None without any."""


def captured_update(*optimizers: Optimizer, compiled: bool = False) -> Callable[[Callable[P, R]], UpdateFunction[P, R]]:
    """Replay a function that goes forward and backward and steps these optimizers from one CUDA graph, by decorating it.

    It gets as arguments what changes from call to call (NumPy arrays come as tensors on the device), and returns tensors, without
    gradients, or None:

        @captured_update(optimizer)
        def update(images, labels):
            optimizer.zero_grad()
            loss = criterion(model(images), labels)
            loss.backward()
            optimizer.step()
            return loss

    Calls run as they are until the fourth of a kind, which is captured, and always where parameters are not on one CUDA device,
    where a value is read on the host, where an argument is changed in place, where Python draws random numbers or changes a
    module's attributes, and where a tensor from elsewhere is another one each time. A global variable that is a number and
    changes must be an argument; learning rates may change. Optimizers are set to `capturable`, which rounds otherwise.

    With `compiled` the function is compiled by `torch.compile` before it is captured, backward and optimizers included: a graph
    of few kernels in the place of many. Each of the optimizers must step once in it.

    Updates that follow each other are one graph together where they are one call: `update.each((images, part) for part in parts)`
    instead of a loop. It is as many calls at first; all arguments are there before the first update.

    Raises:
        UsageError: Without an optimizer.
    """
    if not optimizers or not all(isinstance(one, Optimizer) for one in optimizers):
        raise UsageError("captured_update gets the optimizers that step in the function: @captured_update(optimizer)")

    def decorate(function: Callable[P, R]) -> UpdateFunction[P, R]:
        known: dict[tuple[CodeType, bool], CapturedUpdate] = vars(optimizers[0]).setdefault(_UPDATES, {})
        key = function.__code__, compiled
        update = known.get(key)
        if update is None or not update.is_of(function, optimizers):
            update = known[key] = CapturedUpdate(function, optimizers, compiled=compiled)

        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            return cast(R, update.run(args, kwargs))

        call.each = update.each  # type: ignore[attr-defined]
        return cast(UpdateFunction[P, R], call)

    return decorate


class CapturedUpdate:
    """One function's updates: as they are at first, then replayed."""

    def __init__(
        self,
        function: Callable[..., Any],
        optimizers: Sequence[Optimizer],
        capture: CaptureCall | None = None,
        *,
        compiled: bool = False,
    ) -> None:
        self._function = function
        self._compiled = torch.compile(function, dynamic=False) if compiled else None
        self._rates: dict[Hashable, list[LearningRate]] = {}
        self._optimizers = tuple(optimizers)
        self._capture = capture
        self._num_calls: Counter[Hashable] = Counter()
        self._graphs: dict[Hashable, UpdateGraph] = {}
        self._num_captures = self._num_replays = 0
        self._refused = ""
        self._outer: dict[Hashable, list[weakref.ref[Tensor]]] = {}
        self._modules = [m for root in _modules_around(function) for m in root.modules()]
        self._stream: torch.cuda.Stream | None = None
        self._last: tuple[UpdateKind, UpdateGraph] | None = None
        """The last graph and what it stands for, so that calls in a row are looked up by little."""
        self._rounds: dict[Hashable, tuple[UpdateKind, UpdateGraph]] = {}
        self._num_rounds: Counter[Hashable] = Counter()
        self._may_capture_rounds = True

    def is_of(self, function: Callable[..., Any], optimizers: Sequence[Optimizer]) -> bool:
        """Whether this stands for a function of the same text over the same objects: one that is defined anew each epoch."""
        same = len(self._optimizers) == len(optimizers) and all(
            a is b for a, b in zip(self._optimizers, optimizers, strict=True)
        )
        mine, other = (_contents(f) for f in (self._function, function))
        return same and len(mine) == len(other) and all(map(_is_same, mine, other))

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One update: replayed where there is a graph for it."""
        if torch.compiler.is_compiling() or is_capturing():
            return _detached(self._function(*args, **kwargs))
        if self._last is not None and not kwargs and self._last[0].fits(args) and self._last[1].is_valid():
            self._num_replays += 1
            return self._last[1].run(args)
        self._last = None
        device = self._device()
        if device is None or self._refused:
            return _detached(self._function(*args, **kwargs))
        leaves, form = tree_flatten((args, kwargs))
        leaves = [_on_device(leaf, device) for leaf in leaves]
        kind = self._kind(leaves, form)
        if kind is None:
            return self._plain(leaves, form)
        graph = self._graphs.get(kind)
        if graph is not None and graph.is_valid():
            self._num_replays += 1
            known = UpdateKind.from_call(args, kwargs, self._optimizers, self._modules)
            self._last = (known, graph) if known is not None else None
            return graph.run(leaves)
        self._prepare(device)
        self._num_calls[kind] += 1
        if self._num_calls[kind] < _CALLS_BEFORE or not self._may_capture():
            return self._plain(leaves, form)
        if self._num_calls[kind] == _CALLS_BEFORE:
            return self._looked_at(kind, leaves, form)
        if self._compiled is not None and self._num_calls[kind] <= _CALLS_BEFORE + _COMPILED_CALLS:
            return self._run_compiled(kind, leaves, form, device)
        graph = self._captured(kind, leaves, form, device)
        if graph is None:
            return self._plain(leaves, form)
        self._graphs.pop(kind, None)
        while len(self._graphs) >= _MOST_GRAPHS:
            del self._graphs[next(iter(self._graphs))]
        self._graphs[kind] = graph
        self._num_captures += 1
        return graph.run(leaves)

    def each(self, calls: Iterable[tuple[Any, ...]]) -> Any:
        """Updates with these arguments, one after the other, many by one graph where one is; what the last one returns."""
        every, results = list(calls), None
        for start in range(0, len(every), _MOST_ROUNDS):
            results = self._together(every[start : start + _MOST_ROUNDS])
        return results

    def _together(self, calls: list[tuple[Any, ...]]) -> Any:
        if len(calls) > 1 and self._graphs and not torch.compiler.is_compiling() and not is_capturing():
            unique, rows = _shared(calls)
            if rows in self._rounds:
                known, graph = self._rounds[rows]
                if known.fits(unique) and graph.is_valid():
                    self._num_replays += len(calls)
                    return graph.run(unique)
                del self._rounds[rows]
            captured = self._captured_rounds(calls, unique, rows)
            if captured is not None:
                self._rounds[rows] = captured
                return captured[1].run(unique)
        results = None
        for args in calls:
            results = self.run(args, {})
        return results

    def _captured_rounds(
        self, calls: Sequence[tuple[Any, ...]], unique: tuple[Any, ...], rows: _Rows
    ) -> tuple[UpdateKind, UpdateGraph] | None:
        """A graph of these calls together, once one of their kind has a graph, and they come again; else None."""
        device = self._device()
        one, whole = (UpdateKind.from_call(args, {}, self._optimizers, self._modules) for args in (calls[0], unique))
        if device is None or self._refused or one is None or whole is None or not all(map(one.fits, calls)):
            return None
        kind = self._kind(*tree_flatten((calls[0], {})))
        if kind is None or kind not in self._graphs or not self._graphs[kind].is_valid():
            return None
        self._num_rounds[rows] += 1
        if self._num_rounds[rows] < _CALLS_BEFORE or not (self._may_capture_rounds and self._may_capture()):
            return None
        function = self._compiled or self._function

        def run_all(*arguments: Any) -> Any:
            results = None
            for row in rows:
                results = function(*(arguments[i] for i in row))
            return results

        leaves, form = tree_flatten((unique, {}))
        call = UpdateCall(run_all, leaves, form, self._optimizers, len(rows), is_compiled=self._compiled is not None)
        graph = self._graph_of(call, kind, device)
        if isinstance(graph, str):
            self._may_capture_rounds = False
            warnings.warn(f"updates by {self._function.__name__} are captured one by one: {graph}", stacklevel=4)
            return None
        while len(self._rounds) >= _MOST_GRAPHS:
            del self._rounds[next(iter(self._rounds))]
        self._num_captures += 1
        return whole, graph

    def _may_capture(self) -> bool:
        return self._num_captures < _FREE_CAPTURES + self._num_replays // _FEWEST_REPLAYS

    def _device(self) -> torch.device | None:
        """The one CUDA device of all parameters; None where there is none."""
        devices = {p.device for group in self._groups() for p in group["params"]}
        device = devices.pop() if len(devices) == 1 else None
        return device if device is not None and (device.type == "cuda" or self._capture is not None) else None

    def _groups(self) -> Iterator[dict[str, Any]]:
        for optimizer in self._optimizers:
            yield from optimizer.param_groups

    def _kind(self, leaves: Sequence[Any], form: TreeSpec) -> Hashable | None:
        """What two calls must share to be one graph; None for a call that no graph can stand for."""
        if not torch.is_grad_enabled():
            return None
        parts: list[Hashable] = [form]
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                if leaf.requires_grad:
                    return None
                parts.append((leaf.shape, leaf.dtype, leaf.device))
            elif isinstance(leaf, SCALARS):
                parts.append((type(leaf), leaf))
            else:
                return None
        for group in self._groups():
            parts.append(id(group))  # a loaded state has groups, and tensors, of its own
            parts += [(name, value) for name, value in group.items() if is_of_kind(name, group)]
            parts += [(p.data_ptr(), p.requires_grad) for p in group["params"]]
        parts += [m.training for m in self._modules]
        parts.append(autocast_type())
        try:
            hash(found := tuple(parts))
        except TypeError:
            return None
        return found

    def _prepare(self, device: torch.device) -> None:
        """Have the optimizers count their steps on the device, where a graph can."""
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                if "capturable" in group and device.type == "cuda":
                    group["capturable"] = True
            for state in optimizer.state.values():
                if device.type == "cuda" and isinstance(step := state.get("step"), Tensor):
                    state["step"] = step.to(device)
        if device.type == "cuda" and self._stream is None:
            self._stream = torch.cuda.Stream(device)

    def _plain(self, leaves: Sequence[Any], form: TreeSpec, function: Callable[..., Any] | None = None) -> Any:
        """The call as it is; on the stream of later captures, since what adds up gradients belongs to the stream it began on."""
        function = self._function if function is None else function
        args, kwargs = tree_unflatten(leaves, form)
        if self._stream is None:
            return _detached(function(*args, **kwargs))
        current = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                return _detached(function(*args, **kwargs))
        finally:
            current.wait_stream(self._stream)

    def _run_compiled(self, kind: Hashable, leaves: Sequence[Any], form: TreeSpec, device: torch.device) -> Any:
        """The call compiled, under all that a capture has, so that nothing is compiled again in that."""
        rates = self._rates_of(kind, device)
        for rate in rates:
            rate.refresh()
        with without_autocast_cache(), rates_on_device(rates), hooks_replaced(self._optimizers, {}):
            results = self._plain(leaves, form, self._compiled)
        for optimizer in self._optimizers:
            call_hooks(optimizer)
        return results

    def _rates_of(self, kind: Hashable, device: torch.device) -> list[LearningRate]:
        if kind not in self._rates:
            self._rates[kind] = [LearningRate(group, device) for group in self._groups() if takes_rates(group)]
        return self._rates[kind]

    def _looked_at(self, kind: Hashable, leaves: Sequence[Any], form: TreeSpec) -> Any:
        """The call as it is, and what of it no graph would do."""
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        watch, versions, before = _OuterTensors(tensors), [t._version for t in tensors], self._surroundings()
        stepped: list[Optimizer] = []
        hooks = [one.register_step_post_hook(lambda o, *_: stepped.append(o)) for one in self._optimizers]
        try:
            with watch:
                results = self._plain(leaves, form)
        finally:
            for hook in hooks:
                hook.remove()
        self._outer[kind] = watch.found
        if self._compiled is not None and [id(o) for o in stepped] != [id(o) for o in self._optimizers]:
            self._refuse("compiled updates step each of their optimizers once, in the order in which they are given")
        elif any(ref() is None for ref in watch.found):
            self._refuse("it reads tensors that are made elsewhere for each call: they must be arguments")
        elif [t._version for t in tensors] != versions:
            self._refuse("it changes its arguments in place")
        elif self._surroundings() != before:
            self._refuse("it draws random numbers in Python, or changes what a module holds")
        elif any(not isinstance(leaf, Tensor) for leaf in tree_iter(results) if leaf is not None):
            self._refuse("it returns something other than tensors")
        return results

    def _surroundings(self) -> list[Any]:
        numpy = sys.modules.get("numpy")
        found: list[Any] = [random.getstate(), None if numpy is None else str(numpy.random.get_state())]
        found += [[(n, v) for n, v in vars(m).items() if isinstance(v, SCALARS)] for m in self._modules]
        return found

    def _refuse(self, why: str) -> None:
        self._refused = why
        warnings.warn(f"updates by {self._function.__name__} are not captured: {why}", stacklevel=4)

    def _captured(
        self, kind: Hashable, leaves: Sequence[Any], form: TreeSpec, device: torch.device
    ) -> UpdateGraph | None:
        """A graph of this call, which is not run by that; None, with a warning, where there can be none."""
        is_compiled = self._compiled is not None
        call = UpdateCall(self._compiled or self._function, leaves, form, self._optimizers, 1, is_compiled=is_compiled)
        graph = self._graph_of(call, kind, device)
        if isinstance(graph, str):
            self._refuse(graph)
            return None
        return graph

    def _graph_of(self, call: UpdateCall, kind: Hashable, device: torch.device) -> UpdateGraph | str:
        """A graph of a call, which is not run by that, or why there can be none."""
        gradients = [(p, p.grad) for group in self._groups() for p in group["params"]]
        rates = self._rates_of(kind, device)
        try:
            with own_calls(), without_autocast_cache(), without_host_waits(), rates_on_device(rates):
                return UpdateGraph(call, rates, self._outer[kind], self._begin(device))
        except _ERRORS as e:  # the call as it is shows what is the script's own fault
            for parameter, gradient in gradients:
                parameter.grad = gradient
            return str(e).strip().partition("\n")[0] or type(e).__name__

    def _begin(self, device: torch.device) -> Callable[[Callable[[], Any]], tuple[Any, Callable[[], None]]]:
        if self._capture is not None:
            capture = self._capture
            return lambda call: capture(call, device)
        return lambda call: capture_on_device(call, device, stream=self._stream)


def _shared(calls: Sequence[tuple[Any, ...]]) -> tuple[tuple[Any, ...], _Rows]:
    """Arguments of several calls without those that come again, and for each call the indices of its own among them."""
    numbers: dict[int, int] = {}
    rows = tuple(tuple(numbers.setdefault(id(one), len(numbers)) for one in args) for args in calls)
    by_id = {id(one): one for args in calls for one in args}
    return tuple(by_id[one] for one in numbers), rows


class _OuterTensors(TorchDispatchMode):
    """Finds the tensors that operators read and that neither are arguments nor were made since; the first one of a storage."""

    def __init__(self, own: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._known = {storage_key(t) for t in own}
        self.found: list[weakref.ref[Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for leaf in tree_leaves((args, kwargs or {})):
            if isinstance(leaf, Tensor) and (storage := storage_key(leaf)) not in self._known:
                self._known.add(storage)
                self.found.append(weakref.ref(leaf))
        results = func(*args, **(kwargs or {}))
        self._known.update(storage_key(leaf) for leaf in tree_iter(results) if isinstance(leaf, Tensor))
        return results


def _modules_around(function: Callable[..., Any]) -> list[nn.Module]:
    """Modules that a function reads from around itself, or that such an object (a trainer, an agent) has as attributes."""
    around = [function.__globals__.get(name) for name in function.__code__.co_names] + _contents(function)
    attributes = [
        value
        for one in around
        if not isinstance(one, (nn.Module, type, ModuleType))
        for value in getattr(one, "__dict__", {}).values()
    ]
    return [one for one in (*around, *attributes) if isinstance(one, nn.Module)]


def _contents(function: Callable[..., Any]) -> list[Any]:
    """What the variables hold that a function reads from the functions around it."""
    found = []
    for cell in function.__closure__ or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:  # not assigned yet
            found.append(None)
    return found


def _is_same(one: Any, other: Any) -> bool:
    return one is other or (isinstance(one, SCALARS) and type(one) is type(other) and one == other)


def _on_device(leaf: Any, device: torch.device) -> Any:
    """An array, or a tensor of the host, as a tensor on the device."""
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(leaf, numpy.ndarray) and leaf.dtype.kind in "biuf":
        leaf = torch.from_numpy(leaf)
    return leaf.to(device) if isinstance(leaf, Tensor) and leaf.device != device else leaf


def _detached(results: Any) -> Any:
    """Results without gradients: the backward is over."""
    leaves, form = tree_flatten(results)
    return tree_unflatten([leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves], form)
