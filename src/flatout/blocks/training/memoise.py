"""Results of a function that are cached, and returned again for equal arguments.

    @memoise
    def spectrogram(tone): ...

What counts as equal is the content: of numbers, texts, arrays and small tensors. A large tensor is equal only to itself, as
long as nobody has written to it; a module to itself while its weights, its buffers and its mode are as they were. Writes that
torch does not count, through `.data` of a weight or NumPy's view of a large tensor, are not noticed.
"""

from __future__ import annotations

import functools
import random
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from hashlib import blake2b
from threading import RLock
from typing import Any, Final, ParamSpec, TypeVar, overload
from weakref import ref

import torch
from torch import Tensor, nn

from flatout.core.errors import UsageError
from flatout.core.tensors.generators import generator_states

P = ParamSpec("P")
R = TypeVar("R")
Key = tuple[object, ...]

_SMALL_BYTES: Final = 1 << 20
"""Tensors up to here are compared by their content; a hash of 1 MiB takes about a millisecond (BLAKE2b, 1 GB/s: blake2.net)."""
_MAX_BYTES: Final = 1 << 30
_WATCHED_CALLS: Final = 8
"""Calls during which the random generators are watched."""
_PLAIN: Final = (bool, int, float, complex, str, bytes, type(None), type(Ellipsis))


@overload
def memoise(function: Callable[P, R], /) -> Callable[P, R]: ...
@overload
def memoise(*, max_bytes: int = ...) -> Callable[[Callable[P, R]], Callable[P, R]]: ...
def memoise(function: Callable[..., Any] | None = None, /, *, max_bytes: int = _MAX_BYTES) -> Any:
    """Cache the results of a function; those used longest ago are dropped when all together exceed `max_bytes`.

    Arrays, lists and dicts are handed out as copies, which a caller may write to; a tensor is handed out itself, and computed
    anew once somebody wrote to it, or a backward used up its graph. Raises UsageError in a call that draws random numbers, or is
    given or returns what cannot be compared or copied: such a function must not be memoised.
    """
    if function is None:
        return functools.partial(memoise, max_bytes=max_bytes)
    results = ResultCache(function, max_bytes=max_bytes)

    @functools.wraps(function)
    def memoised(*args: Any, **kwargs: Any) -> Any:
        return results.call(args, kwargs)

    return memoised


class ResultCache:
    """The cached results of one function."""

    def __init__(self, function: Callable[..., Any], *, max_bytes: int) -> None:
        self._function = function
        self._max_bytes = max_bytes
        self._results: OrderedDict[Key, _CachedResult] = OrderedDict()
        self._num_bytes = 0
        self._num_computed = 0
        self._lock = RLock()

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The cached result, or the function's."""
        references: list[object] = []
        key = (_context(), self._key(args, references), self._key(kwargs, references), self._outside(references))
        with self._lock:
            result = self._results.get(key)
            if result is not None and result.is_whole():
                self._results.move_to_end(key)
                return result.handed_out()
        value = self._computed(args, kwargs)
        with self._lock:
            self._keep(key, _CachedResult(value, references, self._name))
        return value

    @property
    def _name(self) -> str:
        return self._function.__qualname__

    def _key(self, value: object, references: list[object]) -> Key:
        try:
            return _key(value, references)
        except TypeError as e:
            raise UsageError(f"'{self._name}' is given {e}, which cannot be compared; take @memoise off") from e

    def _outside(self, references: list[object]) -> Key:
        """Variables outside that the function itself reads, as far as they are plain values, tensors or modules."""
        read = [pair for pair in _read_by(self._function) if isinstance(pair[1], (*_PLAIN, Tensor, nn.Module))]
        return tuple((name, _key(value, references)) for name, value in read)

    def _computed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._num_computed >= _WATCHED_CALLS:
            return self._function(*args, **kwargs)
        self._num_computed += 1
        before = _generators(self._function)
        value = self._function(*args, **kwargs)
        if _generators(self._function) != before:
            raise UsageError(
                f"'{self._name}' draws random numbers, so that its results differ from call to call; take @memoise off"
            )
        return value

    def _keep(self, key: Key, result: _CachedResult) -> None:
        old = self._results.pop(key, None)
        self._num_bytes += result.num_bytes - (old.num_bytes if old is not None else 0)
        self._results[key] = result
        while self._num_bytes > self._max_bytes and self._results:
            self._num_bytes -= self._results.popitem(last=False)[1].num_bytes


class _CachedResult:
    """A result in memory of its own, and the tensors and modules whose identities are in its key."""

    def __init__(self, value: object, references: list[object], name: str) -> None:
        self._inputs = [ref(t) for t in references]
        self._outputs: list[tuple[Tensor, int]] = []
        self.is_used_up = False
        """Whether a backward went through its graph, which is freed."""
        self.num_bytes = 64
        try:
            self._value = self._copied(value, is_first=True)
        except TypeError as e:
            raise UsageError(f"'{name}' returns {e}, which cannot be kept; take @memoise off") from e

    def is_whole(self) -> bool:
        """Whether what it is for is alive (else its identity may be another's now), and its tensors are as they were."""
        is_alive = not self.is_used_up and all(r() is not None for r in self._inputs)
        return is_alive and all(t._version == v for t, v in self._outputs)

    def handed_out(self) -> Any:
        """The value; arrays and containers as copies."""
        return self._copied(self._value, is_first=False)

    def _copied(self, value: Any, *, is_first: bool) -> Any:
        if isinstance(value, Tensor):
            if is_first:
                self._outputs.append((value, _version(value)))
                self.num_bytes += value.numel() * value.element_size()
                if value.grad_fn is not None:
                    value.grad_fn.register_prehook(_using_up(self))
            return value
        if isinstance(value, _PLAIN):
            self.num_bytes += sys.getsizeof(value) if is_first else 0
            return value
        if _is_array(value):
            self.num_bytes += value.nbytes if is_first else 0
            return value.copy()
        if isinstance(value, tuple) or type(value) in (list, set, frozenset):
            items = [self._copied(item, is_first=is_first) for item in value]
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        if type(value) is dict:
            return {name: self._copied(item, is_first=is_first) for name, item in value.items()}
        raise TypeError(f"a {type(value).__name__}")


def _using_up(result: _CachedResult) -> Callable[..., None]:
    known = ref(result)  # the graph must not hold what holds the graph

    def use_up(*_: object) -> None:
        if (now := known()) is not None:
            now.is_used_up = True

    return use_up


def _key(value: Any, references: list[object]) -> Key:
    """What tells a value from others. What is told by its identity is added to `references`.

    Raises TypeError for what cannot be compared.
    """
    if isinstance(value, _PLAIN):
        return (type(value), repr(value) if isinstance(value, (float, complex)) else value)  # -0.0 == 0.0, nan != nan
    if isinstance(value, Tensor):
        return _tensor_key(value, references)
    if isinstance(value, nn.Module):
        return _module_key(value, references)
    if _is_array(value) and not value.dtype.hasobject:
        return ("array", value.shape, value.strides, value.dtype.str, blake2b(value.tobytes()).digest())
    if isinstance(value, (torch.device, torch.dtype, torch.layout, torch.memory_format, type)):
        return (type(value), value)
    if type(value) in (list, tuple, torch.Size):
        return (type(value), *(_key(item, references) for item in value))
    if type(value) is dict:
        return (dict, *((_key(name, references), _key(item, references)) for name, item in value.items()))
    if type(value).__module__ == "numpy" and hasattr(value, "dtype") and not value.dtype.hasobject:
        return (value.dtype.str, value.tobytes())
    raise TypeError(f"a {type(value).__name__}")


def _tensor_key(value: Tensor, references: list[object]) -> Key:
    is_small = value.numel() * value.element_size() <= _SMALL_BYTES and value.device.type == "cpu"
    kind = (value.shape, value.dtype, str(value.device))
    if is_small and not value.requires_grad and value.layout is torch.strided and type(value) is Tensor:
        data = value.detach().contiguous().reshape(-1).view(torch.uint8) if value.numel() else value.reshape(-1)
        return ("tensor", *kind, value.stride(), blake2b(data.numpy().tobytes()).digest())
    references.append(value)
    return ("tensor", *kind, id(value), _version(value), value.requires_grad)


def _module_key(value: nn.Module, references: list[object]) -> Key:
    tensors = [*value.parameters(), *value.buffers()]
    references += [value, *tensors]
    versions = tuple((id(t), _version(t), t.data_ptr(), t.requires_grad) for t in tensors)
    return ("module", id(value), tuple(m.training for m in value.modules()), versions)


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _context() -> Key:
    """What results depend on besides arguments."""
    autocast = tuple(d for d in ("cpu", "cuda") if torch.is_autocast_enabled(d))
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        tuple((d, torch.get_autocast_dtype(d)) for d in autocast),
        torch.get_default_dtype(),
        str(torch.get_default_device()),
    )


def _generators(function: Callable[..., Any]) -> Key:
    """Where the generators stand that a function may draw from: the global ones, and those that it reads by name."""
    states: list[object] = list(generator_states().items())
    numpy = sys.modules.get("numpy")
    for _, value in _read_by(function):
        if isinstance(value, torch.Generator):
            states.append(value.get_state().numpy().tobytes())
        elif isinstance(value, random.Random):
            states.append(value.getstate())
        elif numpy is not None and isinstance(value, numpy.random.Generator):
            states.append(repr(value.bit_generator.state))
    return tuple(states)


def _read_by(function: Callable[..., Any]) -> Iterator[tuple[str, object]]:
    """The variables outside that a function reads by name: global ones that there are, then those of its closure."""
    names = function.__globals__
    yield from ((name, names[name]) for name in function.__code__.co_names if name in names)
    yield from (("", cell.cell_contents) for cell in function.__closure__ or ())


def _is_array(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and type(value) is numpy.ndarray
