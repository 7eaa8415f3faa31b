"""Results of a function that are kept, and handed out again for equal arguments.

    @remember
    def spectrogram(tone): ...

What counts as equal is the content: of numbers, texts, arrays and small tensors. A large tensor is equal only to itself, as
long as nobody has written to it; a module to itself while its weights, its buffers and its mode are as they were. Writes that
torch does not count, through `.data` of a weight or NumPy's view of a large tensor, are not seen.
"""

from __future__ import annotations

import functools
import random
import sys
from collections import OrderedDict
from collections.abc import Callable
from hashlib import blake2b
from threading import RLock
from typing import Any, Final, ParamSpec, TypeVar, overload
from weakref import ref

import torch
from torch import Tensor, nn

from flatout.errors import UsageError

P = ParamSpec("P")
R = TypeVar("R")
Key = tuple[object, ...]

_SMALL_BYTES: Final = 1 << 20
"""Tensors up to here are told by their content; a hash of 1 MiB takes about a millisecond (BLAKE2b, 1 GB/s: blake2.net)."""
_MAX_BYTES: Final = 1 << 30
_WATCHED_CALLS: Final = 8
"""Calls during which the random generators are watched."""
_PLAIN: Final = (bool, int, float, complex, str, bytes, type(None), type(Ellipsis))


@overload
def remember(function: Callable[P, R], /) -> Callable[P, R]: ...
@overload
def remember(*, max_bytes: int = ...) -> Callable[[Callable[P, R]], Callable[P, R]]: ...
def remember(function: Callable[..., Any] | None = None, /, *, max_bytes: int = _MAX_BYTES) -> Any:
    """The function with its results kept; those used longest ago go when all together exceed `max_bytes`.

    Arrays, lists and dicts are handed out as copies, which a caller may write to; a tensor is handed out itself, and computed
    anew once somebody wrote to it, or a backward used up its graph. Raises UsageError in a call that draws random numbers, or is
    given or returns what cannot be compared or copied: such a function must not be remembered.
    """
    if function is None:
        return functools.partial(remember, max_bytes=max_bytes)
    results = Results(function, max_bytes=max_bytes)

    @functools.wraps(function)
    def remembered(*args: Any, **kwargs: Any) -> Any:
        return results.call(args, kwargs)

    return remembered


class Results:
    """The kept results of one function."""

    def __init__(self, function: Callable[..., Any], *, max_bytes: int) -> None:
        self._function = function
        self._max_bytes = max_bytes
        self._kept: OrderedDict[Key, _Result] = OrderedDict()
        self._num_bytes = 0
        self._num_computed = 0
        self._lock = RLock()

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The kept result, or the function's."""
        held: list[object] = []
        key = (_context(), self._key(args, held), self._key(kwargs, held), self._outside(held))
        with self._lock:
            result = self._kept.get(key)
            if result is not None and result.is_whole():
                self._kept.move_to_end(key)
                return result.handed_out()
        value = self._computed(args, kwargs)
        with self._lock:
            self._keep(key, _Result(value, held, self._name))
        return value

    @property
    def _name(self) -> str:
        return self._function.__qualname__

    def _key(self, value: object, held: list[object]) -> Key:
        try:
            return _key(value, held)
        except TypeError as e:
            raise UsageError(f"'{self._name}' is given {e}, which cannot be compared; take @remember off") from e

    def _outside(self, held: list[object]) -> Key:
        """Variables outside that the function itself reads, as far as they are plain values, tensors or modules."""
        code = self._function.__code__
        found: list[object] = []
        for name in code.co_names:
            value = self._function.__globals__.get(name)
            if isinstance(value, (*_PLAIN, Tensor, nn.Module)):
                found.append((name, _key(value, held)))
        for cell in self._function.__closure__ or ():
            if isinstance(cell.cell_contents, (*_PLAIN, Tensor, nn.Module)):
                found.append(_key(cell.cell_contents, held))
        return tuple(found)

    def _computed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._num_computed >= _WATCHED_CALLS:
            return self._function(*args, **kwargs)
        self._num_computed += 1
        before = _generators(self._function)
        value = self._function(*args, **kwargs)
        if _generators(self._function) != before:
            raise UsageError(
                f"'{self._name}' draws random numbers, so that its results differ from call to call; take @remember off"
            )
        return value

    def _keep(self, key: Key, result: _Result) -> None:
        old = self._kept.pop(key, None)
        self._num_bytes += result.num_bytes - (old.num_bytes if old is not None else 0)
        self._kept[key] = result
        while self._num_bytes > self._max_bytes and self._kept:
            self._num_bytes -= self._kept.popitem(last=False)[1].num_bytes


class _Result:
    """A result in memory of its own, and the tensors and modules whose identities are in its key."""

    def __init__(self, value: object, held: list[object], name: str) -> None:
        self._given = [ref(t) for t in held]
        self._made: list[tuple[Tensor, int]] = []
        self._is_used_up = False
        self.num_bytes = 64
        try:
            self._value = self._copied(value, is_first=True)
        except TypeError as e:
            raise UsageError(f"'{name}' returns {e}, which cannot be kept; take @remember off") from e

    def is_whole(self) -> bool:
        """Whether what it is for is alive (else its identity may be another's now), and its tensors are as they were."""
        if self._is_used_up:
            return False
        return all(r() is not None for r in self._given) and all(t._version == v for t, v in self._made)

    def handed_out(self) -> Any:
        """The value; arrays and containers as copies."""
        return self._copied(self._value, is_first=False)

    def use_up(self) -> None:
        """A backward went through its graph, which is freed."""
        self._is_used_up = True

    def _copied(self, value: Any, *, is_first: bool) -> Any:
        if isinstance(value, Tensor):
            if is_first:
                self._made.append((value, _version(value)))
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
        if isinstance(value, tuple):
            items = [self._copied(item, is_first=is_first) for item in value]
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        if type(value) in (list, set, frozenset):
            return type(value)(self._copied(item, is_first=is_first) for item in value)
        if type(value) is dict:
            return {name: self._copied(item, is_first=is_first) for name, item in value.items()}
        raise TypeError(f"a {type(value).__name__}")


def _using_up(result: _Result) -> Callable[..., None]:
    known = ref(result)  # the graph must not hold what holds the graph

    def use_up(*_: object) -> None:
        if (now := known()) is not None:
            now.use_up()

    return use_up


def _key(value: Any, held: list[object]) -> Key:
    """What tells a value from others. What is told by its identity is added to `held`.

    Raises TypeError for what cannot be compared.
    """
    if isinstance(value, _PLAIN):
        return (type(value), repr(value) if isinstance(value, (float, complex)) else value)  # -0.0 == 0.0, nan != nan
    if isinstance(value, Tensor):
        return _tensor_key(value, held)
    if isinstance(value, nn.Module):
        return _module_key(value, held)
    if _is_array(value) and not value.dtype.hasobject:
        return ("array", value.shape, value.strides, value.dtype.str, blake2b(value.tobytes()).digest())
    if isinstance(value, (torch.device, torch.dtype, torch.layout, torch.memory_format, type)):
        return (type(value), value)
    if type(value) in (list, tuple, torch.Size):
        return (type(value), *(_key(item, held) for item in value))
    if type(value) is dict:
        return (dict, *((_key(name, held), _key(item, held)) for name, item in value.items()))
    if type(value).__module__ == "numpy" and hasattr(value, "dtype") and not value.dtype.hasobject:
        return (value.dtype.str, value.tobytes())
    raise TypeError(f"a {type(value).__name__}")


def _tensor_key(value: Tensor, held: list[object]) -> Key:
    is_small = value.numel() * value.element_size() <= _SMALL_BYTES and value.device.type == "cpu"
    kind = (value.shape, value.dtype, str(value.device))
    if is_small and not value.requires_grad and value.layout is torch.strided and type(value) is Tensor:
        data = value.detach().contiguous().reshape(-1).view(torch.uint8) if value.numel() else value.reshape(-1)
        return ("tensor", *kind, value.stride(), blake2b(data.numpy().tobytes()).digest())
    held.append(value)
    return ("tensor", *kind, id(value), _version(value), value.requires_grad)


def _module_key(value: nn.Module, held: list[object]) -> Key:
    kept = [*value.parameters(), *value.buffers()]
    held += [value, *kept]
    versions = tuple((id(t), _version(t), t.data_ptr(), t.requires_grad) for t in kept)
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
    states: list[object] = [torch.get_rng_state().numpy().tobytes(), random.getstate()]
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        kind, keys, *rest = numpy.random.get_state()
        states += [kind, keys.tobytes(), *rest]
    if torch.cuda.is_initialized():
        states += [torch.cuda.get_rng_state(i).numpy().tobytes() for i in range(torch.cuda.device_count())]
    read = [function.__globals__.get(name) for name in function.__code__.co_names]
    read += [cell.cell_contents for cell in function.__closure__ or ()]
    for value in read:
        if isinstance(value, torch.Generator):
            states.append(value.get_state().numpy().tobytes())
        elif isinstance(value, random.Random):
            states.append(value.getstate())
        elif numpy is not None and isinstance(value, numpy.random.Generator):
            states.append(repr(value.bit_generator.state))
    return tuple(states)


def _is_array(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and type(value) is numpy.ndarray
