"""Layers of which some stay on the device and the others come ahead of their use, through a ring that is allocated once."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from flatout.errors import CheckpointError, UsageError
from flatout.inference.streaming.layer import Layer, check
from flatout.inference.streaming.placing import Sizes, device_bytes, placed
from flatout.inference.streaming.predicting import measured, predicted
from flatout.inference.streaming.sources import (
    DiskSource,
    PinnedSource,
    Queue,
    Source,
    host_memory,
    write_file,
)
from flatout.inference.streaming.transit import BITS, Arrival, Transit, fill, planned, told
from flatout.kernels.quantised_linear.packing import GROUP
from flatout.records.streaming import PassMeasurement, PassPrediction

Where = Literal["pinned", "disk"]


def stream_layers(
    layers: Sequence[nn.Module] | nn.ModuleList,
    device: torch.device | str = "cuda",
    *,
    resident_bytes: int | None = None,
    transit: Transit = "as-is",
    source: Where = "pinned",
    folder: Path | None = None,
    ahead: int = 1,
    group: int = GROUP,
) -> StreamedLayers:
    """Keep as many of the layers on the device as `resident_bytes` hold and send the others when they are needed. Inference only.

    `resident_bytes` counts all weights on the device: layers that stay, the ring of `ahead + 1` layers on their way, and room to
    expand one. None: what is free now, less a tenth for activations (on a CPU: no limit, so nothing is streamed). Which layers
    stay is chosen so that the others lie evenly between them.

    `transit`: what goes over the link. 'as-is' gives the results of the plain layers, bit for bit. 'bf16', 'int8' (a scale a
    row) and 'int4' (a bfloat16 scale for `group` numbers of a row) are packed once, here, and expanded on the device by one
    kernel a weight: weights of streamed layers are then rounded, those of the others are not; `sent_as` tells what travels how.
    `source`: 'pinned' host memory, or 'disk', files in `folder` that a thread reads.

    The weights of streamed layers lie in host memory afterwards (as it is: the pinned memory itself; packed: the originals
    besides; from disk as it is: nowhere but in the file). Buffers move to the device. `undo` brings all back, bit for bit.

    The result is one callable, `streamed(x)`; each layer also works in a loop of one's own, where the fastest is to call all in
    order, again and again. With `device='cpu'` copies are real, so that all but the speed can be tried without a GPU. Raises
    UsageError for layers that cannot be streamed and for limits that hold nothing.
    """
    device = _device(device)
    if transit not in BITS or source not in ("pinned", "disk"):
        raise UsageError(
            f"transit '{transit}', source '{source}': give one of {', '.join(BITS)}, and 'pinned' or 'disk'"
        )
    if ahead < 0 or not len(layers):
        raise UsageError(f"{len(layers)} layers, ahead {ahead}: give one layer or more, and ahead of 0 or more")
    if (folder is None) == (source == "disk"):
        raise UsageError(f"source '{source}', folder {folder}: a folder is for source 'disk', which needs one")
    check([*layers])
    return StreamedLayers(
        [*layers],
        device,
        resident_bytes,
        transit,
        ahead=ahead,
        group=group,
        folder=folder if source == "disk" else None,
    )


def _device(device: torch.device | str) -> torch.device:
    device = torch.device(device)
    if device.type not in ("cpu", "cuda") or (device.type == "cuda" and not torch.cuda.is_available()):
        raise UsageError(f"device '{device}': give 'cuda' on a machine with a GPU, or 'cpu'")
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


class StreamedLayers:
    """Layers that are streamed; `undo` ends it, as leaving its `with` does."""

    def __init__(
        self,
        layers: Sequence[nn.Module],
        device: torch.device,
        limit_bytes: int | None,
        transit: Transit,
        *,
        ahead: int,
        group: int,
        folder: Path | None,
    ) -> None:
        self.device, self.transit, self.slots = device, transit, ahead + 1
        plans = [planned(dict(layer.named_parameters()), transit, group=group) for layer in layers]
        sizes = [
            Sizes(sum(p.nbytes for p in layer.parameters()), plan.sent_bytes, plan.expanded_bytes)
            for layer, plan in zip(layers, plans, strict=True)
        ]
        self.streamed = placed(sizes, limit_bytes=_limit(device, limit_bytes), slots=self.slots)
        """Numbers of the layers that are streamed; the others stay on the device."""
        self.device_bytes = device_bytes(sizes, self.streamed, self.slots)
        """Of weights on the device: layers that stay, the ring, and the room to expand one."""
        self.sent_bytes = sum(sizes[i].sent for i in self.streamed)
        """Over the link in each pass."""
        self.sent_as = told([plans[i] for i in self.streamed])
        """Bytes of a pass by how they travel."""
        self.prediction: PassPrediction | None = None
        self.bytes_in = 0
        """Sent to the device until now."""
        self._folder = folder
        self.layers = [Layer(self, i, layer, plan) for i, (layer, plan) in enumerate(zip(layers, plans, strict=True))]
        self._order = [self.layers[i] for i in self.streamed]
        self._source = self._stored(group)
        self._open_ring(sizes)

    # -- the ways in ---------------------------------------------------------------------------------------------------------

    def __call__(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        """Each layer on what the one before returned; further arguments go to all."""
        with torch.no_grad():
            for layer in self.layers:
                x = layer.module(x, *args, **kwargs)
        return x

    def predict(self, x: Any, *args: Any, seconds: float = 2.0, **kwargs: Any) -> PassPrediction:
        """What a pass on these inputs will take, from the link and one layer of each kind, measured alone. Also `prediction`."""
        self.prediction = predicted(self, x, args, kwargs, seconds=seconds)
        return self.prediction

    def measured(self, x: Any, *args: Any, seconds: float = 5.0, **kwargs: Any) -> PassMeasurement:
        """What a pass takes, of passes one after the other, beside the prediction if there is one."""
        return measured(self, x, args, kwargs, seconds=seconds)

    def __enter__(self) -> StreamedLayers:
        return self

    def __exit__(self, *error: object) -> None:
        self.undo()

    def undo(self) -> None:
        """Put weights and buffers back where they were. A second time it does nothing."""
        if not self.layers:
            return
        self._settle()
        self._source.close()
        for layer in reversed(self.layers):
            layer.undo()
        self.layers, self._order = [], []
        self._places.clear()
        self._free.clear()
        self._room = torch.empty(0)

    def __str__(self) -> str:
        gib = 2.0**30
        return (
            f"{len(self.layers) - len(self.streamed)} of {len(self.layers)} layers stay on {self.device} "
            f"({self.device_bytes / gib:.2f} GiB with the ring); {self.sent_bytes / gib:.2f} GiB a pass {self.transit}"
        )

    # -- the ring ------------------------------------------------------------------------------------------------------------

    def _stored(self, group: int) -> Source:
        """The bytes of layers that are streamed where they will come from; layers that stay go to the device."""
        is_gpu = self.device.type == "cuda"
        for layer in self.layers:
            if layer.number not in self.streamed:
                layer.stay()
        stretches: list[Tensor] = []
        files: list[Path] = []
        for layer in self._order:
            stretch = host_memory(layer.plan.sent_bytes)
            fill(stretch, layer.plan, layer.weights, device=self.device)
            if self._folder is None:
                stretches.append(stretch)
                layer.leave(stretch, None)
            else:
                files.append(self._folder / f"layer-{layer.number:04d}.{self.transit}.bin")
                write_file(stretch, files[-1])
                layer.leave(None, files[-1])
        if self._folder is None or not files:
            return PinnedSource(stretches, is_pinned=is_gpu)
        sizes = [layer.plan.sent_bytes for layer in self._order]
        return DiskSource(files, sizes, num_buffers=self.slots + 1, is_pinned=is_gpu)

    def _open_ring(self, sizes: Sequence[Sizes]) -> None:
        num = min(self.slots, len(self._order))
        largest = max((sizes[i].sent for i in self.streamed), default=0)
        room = max((sizes[i].expanded for i in self.streamed), default=0)
        stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self._room = torch.empty(room, dtype=torch.uint8, device=self.device)
        self._places: list[_Place] = [
            _Place(i, torch.empty(largest, dtype=torch.uint8, device=self.device), Queue(stream)) for i in range(num)
        ]
        for layer in self._order:
            layer.arrivals = [Arrival(layer.plan, place.memory, self._room) for place in self._places]
        for order, layer in enumerate(self._order):
            layer.order = order
        for place in self._places:
            place.queue.free()  # memory that torch gives anew may still be in use on the current stream
        self._flying: deque[_Flight] = deque()
        self._free: deque[_Place] = deque(self._places)
        self._next = 0

    def enter(self, layer: Layer) -> dict[str, nn.Parameter]:
        """The weights of a layer, for what is queued from now on; the next ones are on their way."""
        if not self.layers:
            raise UsageError("these layers are no longer streamed; undo was called")
        if self._flying and (self._flying[0].layer is not layer or self._flying[0].versions != layer.versions()):
            self._drop_all()
        if not self._flying:
            self._next = layer.order
        self._send_ahead()
        flight = self._flying[0]
        try:
            flight.wait()
        except CheckpointError:
            self._drop_all()
            raise
        flight.place.queue.wait()
        arrival = layer.arrivals[flight.place.number]
        arrival.expand()
        if layer.plan.expanded_bytes:
            self._release()
        return arrival.weights

    def leave(self, layer: Layer) -> None:
        """The layer has been queued; its place is free after it."""
        if not layer.plan.expanded_bytes and self._flying and self._flying[0].layer is layer:
            self._release()

    def _release(self) -> None:
        flight = self._flying.popleft()
        flight.place.queue.free()
        self._free.append(flight.place)
        self._send_ahead()

    def _send_ahead(self) -> None:
        """As many as there are places, round and round: the first layers of the next pass come while this one ends."""
        while self._free:
            layer, place = self._order[self._next], self._free.popleft()
            wait = self._source.send(layer.order, place.memory, place.queue)
            self._flying.append(_Flight(layer, place, wait, layer.versions()))
            self._next = (self._next + 1) % len(self._order)
            self.bytes_in += layer.plan.sent_bytes

    def _drop_all(self) -> None:
        """Forget what is on its way: another layer was called than the next in order, or weights have changed."""
        while self._flying:
            flight = self._flying.popleft()
            with suppress(CheckpointError):  # told to whoever needs that layer
                flight.wait()
            self._free.append(flight.place)

    @contextmanager
    def alone(self) -> Iterator[Callable[[Sequence[int]], None]]:
        """The ring with nothing on its way, for measurements: a function that sends layers (by their number among those that are
        streamed) and returns when they have come."""
        self._settle()

        def send(numbers: Sequence[int]) -> None:
            for i in numbers:
                place = self._places[i % len(self._places)]
                self._source.send(i, place.memory, place.queue)()
            for place in self._places:
                if place.queue.stream is not None:
                    place.queue.stream.synchronize()

        yield send

    def _settle(self) -> None:
        self._drop_all()
        for place in self._places:
            if place.queue.stream is not None:
                place.queue.stream.synchronize()


class _Place(NamedTuple):
    """One of the ring: bytes on the device, and their queue."""

    number: int
    memory: Tensor
    queue: Queue


class _Flight(NamedTuple):
    """A layer on its way to a place; its weights' versions when it was sent."""

    layer: Layer
    place: _Place
    wait: Callable[[], None]
    versions: list[int]


def _limit(device: torch.device, limit_bytes: int | None) -> int | None:
    if limit_bytes is not None or device.type != "cuda":
        return limit_bytes
    free, total = torch.cuda.mem_get_info(device)
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(free + cached - total // 10)
