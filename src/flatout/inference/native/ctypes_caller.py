"""What c/caller.c does, in Python through ctypes: for machines without Python's headers. The same promises, much slower."""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from math import prod
from typing import Any, Literal, NamedTuple, NoReturn, TypeAlias

from flatout.inference.native.library import Table

Described: TypeAlias = tuple[str, str, tuple[int, ...]]
"""Name, dtype and shape of an input or output."""
Errors: TypeAlias = tuple[type[Exception], type[Exception]]
"""Of arguments that do not fit, and of a call while another thread is stepping."""
_FORMATS = {"float32": ("f", 4), "int32": ("il", 4), "int64": ("lq", 8), "bool": ("?", 1)}
_NATIVE = "@=<" if sys.byteorder == "little" else "@=>!"
_ALIGNMENT = 64
_POINTER = ctypes.c_void_p
_ONE = (None, _POINTER, _POINTER, _POINTER, _POINTER, _POINTER)
_ON_STATE = ctypes.PYFUNCTYPE(None, _POINTER)
_ON_BOTH = ctypes.PYFUNCTYPE(None, _POINTER, _POINTER)
_STEP = ctypes.PYFUNCTYPE(*_ONE)
_STEP_STREAMS = ctypes.PYFUNCTYPE(*_ONE, ctypes.c_int64)
# Unlike PYFUNCTYPE, CFUNCTYPE lets go of Python's lock.
_MANY = ctypes.CFUNCTYPE(*_ONE, ctypes.c_int64)


class _Memory:
    """Zeroed bytes that begin at a multiple of 64."""

    def __init__(self, size: int) -> None:
        self._whole = ctypes.create_string_buffer(size + _ALIGNMENT)
        self.size = size
        self.address = -(-ctypes.addressof(self._whole) // _ALIGNMENT) * _ALIGNMENT

    def read(self, size: int | None = None) -> bytes:
        return ctypes.string_at(self.address, self.size if size is None else size)

    def write(self, data: bytes) -> None:
        ctypes.memmove(self.address, data, len(data))


class _Port(NamedTuple):
    name: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int


class _Span(NamedTuple):
    address: int
    bytes: int


class Weights:
    """Packed numbers, shared by the callers made from them."""

    def __init__(self, packed: bytes) -> None:
        self.numbers = _filled(bytes(packed))

    def set(self, packed: bytes, /) -> None:
        """Other numbers, as many: for all callers, from their next call on."""
        data = bytes(packed)
        if len(data) != self.numbers.size:
            raise ValueError(f"{len(data)} bytes of weights, {self.numbers.size} are needed")
        self.numbers = _filled(data)

    def packed(self) -> bytes:
        """The numbers as bytes."""
        return self.numbers.read()


def _filled(data: bytes) -> _Memory:
    memory = _Memory(len(data))
    memory.write(data)
    return memory


class _Streams:
    """One stream (`num` 0) or several: state, working memory, and where the weights are."""

    def __init__(
        self,
        address: int,
        weights: Weights,
        inputs: tuple[Described, ...],
        outputs: tuple[Described, ...],
        errors: Errors,
        *,
        num: int,
    ) -> None:
        self._arguments = (address, weights, inputs, outputs, errors)
        self._table = table = Table.from_address(address)
        self._weights, self._num, (self._wrong, self._occupied) = weights, num, errors
        if weights.numbers.size != table.weights_bytes:
            raise ValueError(f"{weights.numbers.size} bytes of weights, the library needs {table.weights_bytes}")
        if (len(inputs), len(outputs)) != (table.num_inputs, table.num_outputs):
            raise ValueError("the library has other inputs or outputs than were described")
        self._ins = tuple(_port(one, table.input_bytes[i]) for i, one in enumerate(inputs))
        self._outs = tuple(_port(one, table.output_bytes[i]) for i, one in enumerate(outputs))
        self._lock, self._is_busy = threading.Lock(), False
        self._state = _Memory(table.state_bytes * max(1, num))
        self._work = _Memory(table.streams_work_bytes if num else table.work_bytes)
        self._step = _STEP_STREAMS(table.step_streams) if num else _STEP(table.step)
        self._reset_all()

    def step(self, *arguments: object, out: object = None) -> Any:
        """One event, of each stream where there are several."""
        outs, result = self._outputs(arguments, out, ())
        with ExitStack() as held:
            found = [self._find(one, port, held) for one, port in zip(arguments, self._ins, strict=False)]
            found += [self._find(one, port, held, writes=True) for one, port in zip(outs, self._outs, strict=True)]
            self._check(found, 1)
            with self._held():
                pointers = (
                    self._weights.numbers.address,
                    self._state.address,
                    self._work.address,
                    *self._arrays(found),
                )
                self._step(*pointers, *((self._num,) if self._num else ()))
        return result

    def step_many(self, *arguments: object, out: object = None) -> Any:
        """Many events, one after the other, without Python's lock."""
        with ExitStack() as held:
            found = [self._find(one, port, held) for one, port in zip(arguments, self._ins, strict=False)]
            self._sorted(arguments, out)
            events = self._events(found)
            outs, result = self._outputs(arguments, out, (events,))
            found += [self._find(one, port, held, writes=True) for one, port in zip(outs, self._outs, strict=True)]
            self._check(found, events)
            with self._held():
                self._is_busy = True
            try:
                self._run_many(found, events)
            finally:
                self._is_busy = False
        return result

    def copy(self) -> Any:
        """As many streams again, with the same weights and these states."""
        made = type(self).__new__(type(self))
        _Streams.__init__(made, *self._arguments, num=self._num)
        with self._held():
            made._state.write(self._state.read())
        return made

    def _run_many(self, found: list[_Span], events: int) -> None:
        numbers = self._weights.numbers  # a reference: other weights that come meanwhile are for the next call
        pointers = (numbers.address, self._state.address, self._work.address)
        if not self._num:
            _MANY(self._table.step_many)(*pointers, *self._arrays(found), events)
            return
        step = _MANY(self._table.step_streams)
        for event in range(events):
            at = [_Span(span.address + event * (span.bytes // events), span.bytes) for span in found]
            step(*pointers, *self._arrays(at), self._num)

    def _held(self) -> _Turn:
        return _Turn(self)

    def _arrays(self, found: list[_Span]) -> tuple[Any, Any]:
        ins, outs = found[: len(self._ins)], found[len(self._ins) :]
        return (
            (_POINTER * (len(ins) + 1))(*(s.address for s in ins)),
            (_POINTER * (len(outs) + 1))(*(s.address for s in outs)),
        )

    def _sorted(self, arguments: tuple[object, ...], out: object) -> tuple[object, ...] | None:
        """The outputs that were given."""
        ins, outs = len(self._ins), len(self._outs)
        if out is None and outs and len(arguments) == ins + outs:
            return arguments[ins:]
        if len(arguments) != ins:
            raise TypeError(
                f"got {len(arguments)} arguments; give {ins} inputs, then out= or {outs} outputs by position"
            )
        if isinstance(out, tuple):
            if len(out) != outs:
                raise TypeError(f"out has {len(out)} buffers; give {outs}")
            return out
        if out is not None and outs != 1:
            raise TypeError(f"out is one buffer; give a tuple of {outs}")
        return None if out is None else (out,)

    def _outputs(
        self, arguments: tuple[object, ...], out: object, lead: tuple[int, ...]
    ) -> tuple[tuple[object, ...], Any]:
        """The outputs, made where none were given, and what the call returns."""
        given = self._sorted(arguments, out)
        if given is None:
            from numpy import empty

            shape = (*lead, *((self._num,) if self._num else ()))
            given = tuple(empty((*shape, *port.shape), port.dtype) for port in self._outs)
        elif isinstance(out, tuple):
            return given, out
        return given, given[0] if len(given) == 1 else given

    def _events(self, found: list[_Span]) -> int:
        for span, port in zip(found, self._ins, strict=True):
            each = port.bytes * max(1, self._num)
            if each and span.bytes % each:
                self._refuse(port, f"got {span.bytes} bytes, no multiple of the {each} of one event")
            if each:
                return span.bytes // each
        raise self._wrong("the number of events cannot be told from what was given; give an input that has a size")

    def _check(self, found: list[_Span], events: int) -> None:
        ports = (*self._ins, *self._outs)
        for span, port in zip(found, ports, strict=True):
            expected = port.bytes * max(1, self._num) * events
            if span.bytes != expected:
                times = "" if expected == port.bytes else f" ({events} events in each of {max(1, self._num)} streams)"
                self._refuse(port, f"got {span.bytes} bytes, expected {expected}{times}")
        for o in range(len(self._ins), len(found)):
            for i in range(o):
                a, b = found[o], found[i]
                if a.bytes and b.bytes and a.address < b.address + b.bytes and b.address < a.address + a.bytes:
                    raise self._wrong(
                        f"output '{ports[o].name}' lies in the memory of '{ports[i].name}'; give it memory of its own"
                    )

    def _refuse(self, port: _Port, what: str) -> NoReturn:
        raise self._wrong(f"'{port.name}' is {port.dtype} of shape {port.shape}: {what}")

    def _find(self, given: object, port: _Port, held: ExitStack, *, writes: bool = False) -> _Span:
        """Where the numbers lie. `held` keeps them there."""
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(given, torch.Tensor):
            return self._find_tensor(given, port, torch)
        try:
            view = held.enter_context(memoryview(given))  # type: ignore[arg-type]
        except (ValueError, BufferError) as e:
            self._refuse(port, str(e))
        except TypeError:
            self._refuse(port, f"got '{type(given).__name__}'; give a NumPy array, a tensor on the CPU or bytes")
        if not view.c_contiguous:
            self._refuse(port, "got a buffer that is not contiguous; give numpy.ascontiguousarray(x)")
        letter = view.format[1:] if view.format[0] in _NATIVE else view.format
        letters, size = _FORMATS[port.dtype]
        if letter not in ("B", "b", "c") and (len(letter) != 1 or letter not in letters or view.itemsize != size):
            self._refuse(
                port, f"got a buffer of format '{view.format}' with {view.itemsize} bytes a number; convert it"
            )
        if writes and view.readonly:
            self._refuse(port, "got an output that is read-only")
        return _Span(_address_of(view, held), view.nbytes)

    def _find_tensor(self, tensor: Any, port: _Port, torch: Any) -> _Span:
        if not tensor.is_cpu:
            self._refuse(port, "got a tensor that is not on the CPU; give tensor.cpu()")
        if not tensor.is_contiguous():
            self._refuse(port, "got a tensor that is not contiguous; give tensor.contiguous()")
        if tensor.dtype != getattr(torch, port.dtype):
            self._refuse(port, f"got a tensor of {tensor.dtype}; convert it")
        if tensor.is_neg():
            self._refuse(port, "got a tensor whose sign is still to be turned; give tensor.resolve_neg()")
        return _Span(tensor.data_ptr(), tensor.nbytes)

    def _reset_all(self) -> None:
        for i in range(max(1, self._num)):
            _ON_STATE(self._table.reset)(self._at(i))

    def _reset(self, i: int | None) -> None:
        with self._held():
            if i is None:
                self._reset_all()
            else:
                _ON_STATE(self._table.reset)(self._at(i))

    def _at(self, i: int) -> int:
        if not 0 <= i < max(1, self._num):
            raise self._wrong(f"stream {i} of {self._num}")
        return self._state.address + i * int(self._table.state_bytes)

    def _snapshot(self, i: int) -> bytes:
        plain = _Memory(self._table.snapshot_bytes)
        with self._held():
            _ON_BOTH(self._table.snapshot)(self._at(i), plain.address)
        return plain.read()

    def _restore(self, i: int, snapshot: bytes) -> None:
        data = bytes(snapshot)
        if len(data) != self._table.snapshot_bytes:
            raise self._wrong(f"a snapshot of this model has {self._table.snapshot_bytes} bytes, got {len(data)}")
        plain = _filled(data)
        with self._held():
            _ON_BOTH(self._table.restore)(self._at(i), plain.address)


class _Turn:
    """What is short waits its turn; what comes while `step_many` runs is refused."""

    def __init__(self, streams: _Streams) -> None:
        self._streams = streams

    def __enter__(self) -> None:
        self._streams._lock.acquire()
        if self._streams._is_busy:
            self._streams._lock.release()
            raise self._streams._occupied(
                "this engine is stepping in another thread; make another with streams or copy()"
            )

    def __exit__(self, *unused: object) -> Literal[False]:
        self._streams._lock.release()
        return False


class Streams(_Streams):
    """`num` streams, stepped together: inputs are [num, ...], of `step_many` [T, num, ...]."""

    @property
    def num_streams(self) -> int:
        """How many."""
        return self._num

    def reset(self, i: int | None = None, /) -> None:
        """One stream, or all."""
        self._reset(i)

    def snapshot(self, i: int, /) -> bytes:
        """A stream's state as bytes, in plain order."""
        return self._snapshot(i)

    def restore(self, i: int, snapshot: bytes, /) -> None:
        """A stream's state."""
        self._restore(i, snapshot)


class Caller(_Streams):
    """One stream."""

    def __init__(
        self,
        address: int,
        weights: Weights,
        inputs: tuple[Described, ...],
        outputs: tuple[Described, ...],
        errors: Errors,
        /,
    ) -> None:
        super().__init__(address, weights, inputs, outputs, errors, num=0)

    def reset(self) -> None:
        """The state as it was at first."""
        self._reset(None)

    def snapshot(self) -> bytes:
        """The state as bytes, in plain order."""
        return self._snapshot(0)

    def restore(self, snapshot: bytes, /) -> None:
        """The state of a snapshot."""
        self._restore(0, snapshot)

    def streams(self, num: int, /) -> Streams:
        """Streams with the same weights."""
        if num < 1:
            raise self._wrong(f"{num} streams; give 1 or more")
        return Streams(*self._arguments, num=num)


def _port(described: Described, num_bytes: int) -> _Port:
    name, dtype, shape = described
    if dtype not in _FORMATS:
        raise ValueError(f"dtype '{dtype}' of '{name}' is not known")
    by_shape = prod(shape) * _FORMATS[dtype][1]
    if by_shape != num_bytes:
        raise ValueError(f"'{name}' has {by_shape} bytes by its shape, {num_bytes} in the library")
    return _Port(name, dtype, shape, by_shape)


def _address_of(view: memoryview, held: ExitStack) -> int:
    """Where a view's bytes lie; of what is read-only, where a copy of them lies."""
    if not view.nbytes:
        return 0
    kind: Callable[[memoryview], Any] = (ctypes.c_char * view.nbytes).from_buffer
    if view.readonly:
        kind = (ctypes.c_char * view.nbytes).from_buffer_copy
    array = kind(view.cast("B") if view.ndim != 1 or view.format != "B" else view)
    held.callback(_keep, array)
    return ctypes.addressof(array)


def _keep(array: object) -> None:
    """Holds its argument until the stack is left."""
