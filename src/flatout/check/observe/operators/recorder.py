"""Every operator of a few deep steps: what it was, on which line, how long it took, and what produced its inputs.

A TorchDispatchMode sees each operator below autograd, so forward and backward alike, and the user's frames above it. A
backward operator is brought home to its forward line through autograd's sequence numbers: a node's number is the counter's
value when the forward operator produced it.
"""

from __future__ import annotations

import math
import sys
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cache
from time import perf_counter
from types import FrameType
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from flatout.check.observe.calls import is_wrapper
from flatout.core.records.evidence import RepeatedModule
from flatout.core.runtime.source_sites import Sites
from flatout.core.tensors.host_bytes import host_bytes
from flatout.machine.cost.families import COMPILED_GRAPH
from flatout.machine.cost.flops import operator_flop

"""The name of a row that is a whole graph compiled by Inductor: one call, whatever kernels run in it."""
CAN_WATCH_COMPILED: Final = hasattr(TorchDispatchMode, "ignore_compile_internals")
"""Whether this torch lets compiled code run as it is under a dispatch mode."""
MAX_CALLS: Final = 60_000
"""Calls recorded in one deep step; a step with more is recorded up to here and marked truncated."""

_SKIPPED_NAMESPACES: Final = ("profiler.", "prim.")
_HASH_LIMIT_BYTES: Final = 64 << 20
_RANDOM: Final = (
    "rand",
    "normal",
    "bernoulli",
    "multinomial",
    "dropout",
    "exponential",
    "uniform",
    "poisson",
    "cauchy",
)
_COLLECTIVE: Final = ("c10d.", "_c10d_functional", "fsdp.")
"""Namespaces of operators whose results come from other processes."""
_EMPTY: Final = ("aten.empty", "aten.new_empty", "aten.empty_like", "aten.empty_strided", "aten.new_empty_strided")
_READS: Final = {
    "aten._local_scalar_dense": "item",
    "aten.nonzero": "nonzero",
    "aten.masked_select": "masked_select",
    "aten.equal": "equal",
    "aten._unique2": "unique",
    "aten.unique_dim": "unique",
}
_HEAD_START_CALLS: Final = 128
_HEAD_START_CYCLES: Final = 12_000_000
"""About 6 ms at 2 GHz: the host needs less than that to queue 128 observed operators."""


class TensorMeta(NamedTuple):
    """What identifies a tensor argument's kind."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    is_contiguous: bool
    device: str
    num_stored: int | None = None
    """Numbers that a sparse tensor holds; None of a dense one."""


class OperatorKey(NamedTuple):
    """What makes two calls the same row."""

    op: str
    site: int
    module: str
    phase: str
    inputs: tuple[TensorMeta, ...]
    outputs: tuple[TensorMeta, ...]
    scalars: str


class RecordedCall(NamedTuple):
    """One recorded call. Times in seconds; `events` are device events around it, or None."""

    key: OperatorKey
    op_s: float
    python_s: float
    producers: tuple[int, ...]
    creators: tuple[int, ...]
    is_constant: bool
    events: tuple[torch.cuda.Event, torch.cuda.Event] | None


class Example(NamedTuple):
    """One call's function and arguments, tensors replaced by their description, small index tensors as they are."""

    func: Callable[..., object]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class OperatorCall(NamedTuple):
    """A call of an operator that has just run, with its tensors."""

    func: Any
    key: OperatorKey
    inputs: Sequence[Tensor]
    results: Sequence[Tensor]
    producers: tuple[int, ...]
    """For each input, the call of this step that it came from; -1 for what was there before."""


class OperatorListener(ABC):
    """Hears of every operator of a deep step."""

    @abstractmethod
    def on_operator(self, call: OperatorCall) -> None:
        """An operator has just run; what is done here is neither recorded nor timed."""


class DeepStep:
    """What was recorded in one deep step."""

    def __init__(self) -> None:
        self.calls: list[RecordedCall] = []
        self.reads: list[tuple[int, str, str, bool]] = []
        self.constants: dict[int, list[int]] = {}
        self.truncated = False
        self.root_calls = self.evaluation_calls = 0
        self.cells: tuple[RepeatedModule, ...] = ()


class Interception(TorchDispatchMode):
    """A dispatch mode that is entered at the start of a step and left at its end, in no `with` block."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def enter(self) -> None:
        """Begin to intercept the operators of this thread."""
        self.__enter__()  # type: ignore[no-untyped-call]

    def leave(self) -> None:
        """Stop intercepting the operators of this thread."""
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]


class OperatorRecorder(Interception):
    """Records into `step` while entered.

    `phase` and `module` are asked at each operator; `is_device` switches on device events; `is_data` decides whether an outside
    tensor came with the batch.
    """

    def __init__(
        self,
        sites: Sites,
        *,
        phase: Callable[[], str],
        module: Callable[[], str],
        is_device: bool,
        listeners: Sequence[OperatorListener] = (),
    ) -> None:
        super().__init__()
        self.step = DeepStep()
        self.examples: dict[OperatorKey, Example] = {}
        self.callers: dict[int, tuple[int, ...]] = {}
        self.backward_sites: set[int] = set()
        self.data_storages: set[int] = set()
        self.outside_float64: set[int] = set()
        self._backward_frame: FrameType | None = None
        self.is_paused = False
        self._sites = sites
        self._phase = phase
        self._module = module
        self._is_device = is_device
        self._listeners = tuple(listeners)
        self._last_end = perf_counter()
        self._line_of_node: dict[int, tuple[int, str]] = {}
        self._last_node = torch._C._autograd._get_sequence_nr() - 1
        self._producer: dict[int, int] = {}
        self._creator: dict[int, int] = {}
        self._constant: dict[int, bool] = {}
        self.graph_flop: dict[OperatorKey, int] = {}
        self._graph_flop: int | None = None
        """FLOP counted so far in the compiled graph that runs now; None outside any."""

    def leave(self) -> None:
        """Stop intercepting the operators of this thread, and recording."""
        super().leave()
        self.is_paused = True

    def begin(self) -> None:
        """Start a new deep step; the one before stays with the caller."""
        self.step = DeepStep()
        self._producer.clear()
        self._creator.clear()
        self._constant.clear()
        self._line_of_node.clear()
        self._last_node = torch._C._autograd._get_sequence_nr() - 1
        self._head_start()
        self._last_end = perf_counter()

    def resume(self) -> None:
        """Forget the time since the last operator: it was ours, not the user's."""
        self._last_end = perf_counter()

    def skip(self, seconds: float) -> None:
        """So much of the time since the last operator was ours; the rest is the user's."""
        self._last_end += seconds

    def note_backward(self, frame: FrameType | None) -> None:
        """A backward begins, called from this frame (None: it ended)."""
        while frame is not None and not self._sites.is_user_code(frame.f_code):
            frame = frame.f_back
        self._backward_frame = frame
        if frame is not None:
            site = self._sites.of_frame(frame)
            self.backward_sites.add(site)
            self.callers.setdefault(site, self._sites.chain(frame)[1:])

    def has_producer(self, tensor: Tensor) -> bool:
        """Whether an operator of this step wrote the tensor's memory."""
        return storage_of(tensor) in self._producer

    def creator_site(self, tensor: Tensor) -> int:
        """The line that allocated a tensor's memory in this step, followed through stack and cat to where its width arose."""
        index = self._creator.get(storage_of(tensor), -1)
        site = -1
        while index >= 0:
            call = self.step.calls[index]
            site = call.key.site
            if call.key.op not in ("aten.stack", "aten.cat", "aten._to_copy", "aten.clone"):
                break
            index = call.creators[0] if call.creators else -1
        return site

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Asked by dynamo: compiled code runs as it is while we record, and shows itself by its calls of `graph`."""
        return True

    def graph(self, run: Callable[[], object], inputs: Sequence[object]) -> object:
        """A compiled graph runs: recorded as one row, with the FLOP of the operators that it calls outside its own kernels."""
        if self.is_paused or self._graph_flop is not None or len(self.step.calls) >= MAX_CALLS:
            return run()
        python_s = perf_counter() - self._last_end
        tensors = _tensors(list(inputs))
        metas, storages = tuple(map(_meta, tensors)), tuple(map(storage_of, tensors))
        producers = tuple(self._producer.get(s, -1) for s in storages)
        site, module, phase = self.place_of(sys._getframe(1))
        events = _event_pair() if self._is_device else None
        self._graph_flop = 0
        if events:
            events[0].record()
        before = perf_counter()
        try:
            out = run()
        finally:
            op_s = perf_counter() - before
            flop, self._graph_flop = self._graph_flop, None
        if events:
            events[1].record()
        results = _tensors(out if isinstance(out, (list, tuple)) else (out,))
        key = OperatorKey(COMPILED_GRAPH, site, module, phase, metas, tuple(map(_meta, results)), "")
        self.graph_flop[key] = flop
        for result in results:
            storage = storage_of(result)
            self._producer[storage] = self._creator[storage] = len(self.step.calls)
            self._constant[storage] = False
        self.step.calls.append(RecordedCall(key, op_s, python_s, producers, (), False, events))
        self._last_end = perf_counter()
        return out

    def __torch_dispatch__(
        self, func: Any, types: Sequence[Any], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        start = perf_counter()
        kwargs = kwargs or {}
        if torch.is_inference_mode_enabled() and is_composite(func):
            with self:
                return func.decompose(*args, **kwargs)
        name, is_view, silently_written = signature_of(func)
        if self.is_paused or len(self.step.calls) >= MAX_CALLS or name.startswith(_SKIPPED_NAMESPACES):
            self.step.truncated |= not self.is_paused and len(self.step.calls) >= MAX_CALLS
            return func(*args, **kwargs)
        if self._graph_flop is not None:
            shapes = [tuple(t.shape) for t in _tensors(args)]
            out = func(*args, **kwargs)
            self._graph_flop += operator_flop(name, shapes, [tuple(t.shape) for t in _tensors((out,))]) or 0
            return out
        python_s = start - self._last_end
        tensors = _tensors(args)
        if kwargs:
            tensors += _tensors(tuple(kwargs.values()))
        inputs = tuple(map(_meta, tensors))
        storages = tuple(map(storage_of, tensors))
        producers = tuple(self._producer.get(s, -1) for s in storages)
        creators = tuple(self._creator.get(s, -1) for s in storages)
        for meta, storage in zip(inputs, storages, strict=True):
            if meta.dtype == torch.float64 and storage not in self._producer:
                self.outside_float64.add(storage)
        site, module, phase = self.place_of(sys._getframe(1))
        constant = self._is_constant(name, tensors, storages, phase, site)
        on_device = self._is_device and (not inputs or any(m.device != "cpu" for m in inputs))
        events = _event_pair() if on_device else None
        if events:
            events[0].record()
        before = perf_counter()
        out = func(*args, **kwargs)
        op_s = perf_counter() - before
        if events:
            events[1].record()
        results = _tensors((out,))
        outputs = tuple(map(_meta, results))
        key = OperatorKey(name, site, module, phase, inputs, outputs, _scalars(args, kwargs))
        index = len(self.step.calls)
        for result in results if silently_written is None else _written(silently_written, args, kwargs):
            storage = storage_of(result)
            if storage < 0 or (is_view and storage in storages):
                continue  # who reads a view reads what the memory's last writer wrote
            self._producer[storage] = index
            if storage not in storages:
                self._creator[storage] = index
            self._constant[storage] = constant
        if on_device and waits_for_device(name, inputs, outputs):
            op_s = (
                0.0  # the host only waited, for our own head start too: steps that watch reads measure what they cost
            )
        self.step.calls.append(RecordedCall(key, op_s, python_s, producers, creators, constant, events))
        if key not in self.examples:
            self.examples[key] = Example(
                func, tuple(_describe(a) for a in args), {k: _describe(v) for k, v in kwargs.items()}
            )
        if constant and results and not name.startswith(_EMPTY):
            self.step.constants.setdefault(site, []).append(_fingerprint(results[0]))
        self._note_read(name, site, phase, inputs, outputs)
        if on_device and (index % _HEAD_START_CALLS == 0 or name in _READS):
            self._head_start()  # a read has just emptied the queue
        if self._listeners:
            call = OperatorCall(func, key, tensors, results, producers)
            for listener in self._listeners:
                listener.on_operator(call)
        self._last_end = perf_counter()
        return out

    def place_of(self, frame: FrameType) -> tuple[int, str, str]:
        """The user's line, the module path and the phase of the operator now being dispatched from `frame`."""
        node = torch._C._current_autograd_node()
        site = self._sites.of_frame(frame)
        if site not in self.callers:
            self.callers[site] = self._sites.chain(frame)[1:]
        if node is None:
            last = torch._C._autograd._get_sequence_nr() - 1
            module = self._module()
            if last > self._last_node:
                for number in range(self._last_node + 1, last + 1):
                    self._line_of_node[number] = (site, module)
                self._last_node = last
            return site, module, self._phase()
        number = node._sequence_nr()
        forward = self._line_of_node.get(number)
        if forward is not None and not self._is_inside_user_backward(frame):
            return forward[0], forward[1], "backward"
        return site, "", "backward"

    def _is_inside_user_backward(self, innermost: FrameType) -> bool:
        """Whether user code runs below the backward call: a custom backward, or a recomputed forward."""
        frame: FrameType | None = innermost
        while frame is not None:
            if frame is self._backward_frame:
                return False
            if self._sites.is_user_code(frame.f_code):
                return self._backward_frame is not None
            frame = frame.f_back
        return False

    def _is_constant(self, name: str, tensors: list[Tensor], storages: tuple[int, ...], phase: str, site: int) -> bool:
        """Whether the result depends on nothing but constants: no parameter, no batch, no random number."""
        if site < 0 or phase in ("backward", "optimizer") or name.startswith(_COLLECTIVE):
            return False
        if any(r in name for r in _RANDOM):
            return False
        for tensor, storage in zip(tensors, storages, strict=True):
            if is_wrapper(tensor):
                return False
            known = self._constant.get(storage)
            if known is None:
                known = not (tensor.requires_grad or storage in self.data_storages)
            if not known:
                return False
        return True

    def _note_read(
        self, name: str, site: int, phase: str, inputs: tuple[TensorMeta, ...], outputs: tuple[TensorMeta, ...]
    ) -> None:
        call = _READS.get(name)
        on_device = any(m.device != "cpu" for m in inputs)
        if call is None and waits_for_device(name, inputs, outputs):
            call = "to cpu"
        if call is not None and phase != "optimizer":
            self.step.reads.append((site, call, phase, on_device))

    def _head_start(self) -> None:
        """Keep the device busy while the host queues, so that device events measure kernels and not the host."""
        if self._is_device:
            torch.cuda._sleep(_HEAD_START_CYCLES)


@cache
def is_composite(func: Any) -> bool:
    """Whether a call consists of other operators for every kind of tensor (`aten.linear`, `aten.to`).

    Autograd decomposes such calls before they are recorded; in inference mode, where there is no autograd, we do.
    """
    return bool(func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd))


def waits_for_device(name: str, inputs: Sequence[TensorMeta], outputs: Sequence[TensorMeta]) -> bool:
    """Whether the host waits in this call until the device has done all that is queued: it reads a result back."""
    if not any(m.device != "cpu" for m in inputs):
        return False
    is_copy = name in ("aten._to_copy", "aten.copy_")
    return name in _READS or (is_copy and bool(outputs) and outputs[0].device == "cpu")


class Signature(NamedTuple):
    """What the schema of an operator says of it."""

    name: str
    is_view: bool
    """Whether a result may share the memory of an argument that is only read."""
    silently_written: tuple[tuple[int, str], ...] | None
    """Position and name of the arguments that are written to, where nothing is returned."""


@cache
def signature_of(func: Any) -> Signature:
    """The signature of an operator, read from its schema once."""
    aliased = [(place, a) for place, a in enumerate(func._schema.arguments) if a.alias_info is not None]
    written = tuple((place, a.name) for place, a in aliased if a.alias_info.is_write)
    name = f"{func.namespace}.{func._schema.name.partition('::')[2]}"
    return Signature(name, len(written) < len(aliased), None if func._schema.returns else written)


def _written(which: tuple[tuple[int, str], ...], args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors that a call without a result writes to (`_foreach_mul_`)."""
    return _tensors([args[i] if i < len(args) else kwargs.get(name) for i, name in which])


def _tensors(values: Sequence[Any]) -> list[Tensor]:
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found.extend(v for v in value if isinstance(v, Tensor))
    return found


def _meta(tensor: Tensor) -> TensorMeta:
    if tensor.layout is torch.strided:
        return TensorMeta(tuple(tensor.shape), tensor.dtype, tensor.is_contiguous(), tensor.device.type)
    return TensorMeta(tuple(tensor.shape), tensor.dtype, False, tensor.device.type, _num_stored(tensor))


def _num_stored(tensor: Tensor) -> int | None:
    """Numbers in a sparse tensor, None where its layout does not tell."""
    try:
        return int(tensor._nnz()) * math.prod(tensor.shape[tensor.sparse_dim() :])
    except (AttributeError, NotImplementedError, RuntimeError):
        return None


def storage_of(tensor: Tensor) -> int:
    """The identity of the memory behind a tensor, equal for views of one another; -1 where there is none."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except NotImplementedError:
        return -1


def _scalars(args: Sequence[Any], kwargs: dict[str, Any]) -> str:
    """The arguments that are not tensors, short; masks, dims and scales differ in them."""
    parts = [repr(a) for a in args if _is_plain(a)]
    parts += [f"{k}={v!r}" for k, v in kwargs.items() if _is_plain(v)]
    return ", ".join(parts)[:80]


def _is_plain(value: object) -> bool:
    if isinstance(value, (list, tuple)):
        return bool(value) and all(isinstance(v, (int, float, bool)) for v in value)
    return isinstance(value, (int, float, bool, str, torch.dtype))


def _describe(value: Any) -> Any:
    """A tensor's description in place of the tensor; integer tensors up to 1 MiB stay, they are indices."""
    if isinstance(value, Tensor):
        is_index = not value.dtype.is_floating_point and not value.dtype.is_complex
        if is_index and value.numel() * value.element_size() <= 1 << 20:
            return value.detach().clone()
        return (_meta(value), tuple(value.stride()) if value.layout is torch.strided else ())
    if isinstance(value, (list, tuple)) and any(isinstance(v, Tensor) for v in value):
        return [_describe(v) for v in value]
    return value


def _fingerprint(tensor: Tensor) -> int:
    """A number that differs when a bit of the tensor differs (with overwhelming probability)."""
    if tensor.numel() * tensor.element_size() > _HASH_LIMIT_BYTES or tensor.is_sparse:
        return id(tensor)
    flat = tensor.detach().contiguous().reshape(-1)
    if flat.numel() == 0:
        return 0
    on_host = flat.view(torch.uint8).cpu()
    try:
        return zlib.crc32(host_bytes(on_host))
    except ValueError:  # a wrapper of other tensors
        return id(tensor)


def _event_pair() -> tuple[torch.cuda.Event, torch.cuda.Event]:
    return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
