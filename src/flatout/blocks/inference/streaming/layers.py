"""Layers of which some stay on the device and the others come ahead of their use, through a ring that is allocated once."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import torch
from torch import Tensor, nn

from flatout.blocks.inference.streaming.layer import StreamedLayer, check_layers
from flatout.blocks.inference.streaming.placement import (
    LayerSizes,
    Timed,
    device_bytes,
    pass_s,
    select_streamed_layers,
)
from flatout.blocks.inference.streaming.prediction import PassMeasurement, PassPrediction, compute_s, kind_of
from flatout.blocks.inference.streaming.sources import (
    DiskSource,
    PinnedSource,
    RingPlace,
    host_memory,
    write_bytes,
)
from flatout.blocks.inference.streaming.transit import BITS, Arrival, Transit, bytes_by_transit, fill, plan_transit
from flatout.blocks.kernels.quantised_linear.packing import GROUP
from flatout.blocks.streaming.weight_stream import WeightStream, streaming_device
from flatout.core.errors import CheckpointError, UsageError
from flatout.machine.measure.timer import HostClock, time_call

Where = Literal["pinned", "disk"]
_MOST_SENDS: Final = 8
"""Layers that are sent to measure the link, at most."""


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
    device = streaming_device(device)
    if transit not in BITS or source not in ("pinned", "disk"):
        raise UsageError(
            f"transit '{transit}', source '{source}': give one of {', '.join(BITS)}, and 'pinned' or 'disk'"
        )
    if ahead < 0 or not len(layers):
        raise UsageError(f"{len(layers)} layers, ahead {ahead}: give one layer or more, and ahead of 0 or more")
    if (folder is None) == (source == "disk"):
        raise UsageError(f"source '{source}', folder {folder}: a folder is for source 'disk', which needs one")
    check_layers([*layers])
    return StreamedLayers(
        [*layers],
        device,
        resident_bytes,
        transit,
        ahead=ahead,
        group=group,
        folder=folder if source == "disk" else None,
    )


class StreamedLayers(WeightStream["_Flight"]):
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
        super().__init__(device)
        self.transit, self.num_buffers = transit, ahead + 1
        plans = [plan_transit(dict(layer.named_parameters()), transit, group=group) for layer in layers]
        sizes = [
            LayerSizes(sum(p.nbytes for p in layer.parameters()), plan.sent_bytes, plan.expanded_bytes)
            for layer, plan in zip(layers, plans, strict=True)
        ]
        self.streamed = select_streamed_layers(
            sizes, limit_bytes=_limit(device, limit_bytes), num_buffers=self.num_buffers
        )
        """Numbers of the layers that are streamed; the others stay on the device."""
        self.device_bytes = device_bytes(sizes, self.streamed, self.num_buffers)
        """Of weights on the device: layers that stay, the ring, and the room to expand one."""
        self.sent_bytes = sum(sizes[i].sent for i in self.streamed)
        """Over the link in each pass."""
        self.sent_as = bytes_by_transit([plans[i] for i in self.streamed])
        """Bytes of a pass by how they travel."""
        self.prediction: PassPrediction | None = None
        self._folder = folder
        self.layers = [
            StreamedLayer(i, layer, plan, device=device, bring=self._brought)
            for i, (layer, plan) in enumerate(zip(layers, plans, strict=True))
        ]
        self._modules = self._order = [self.layers[i] for i in self.streamed]
        self._source = self._stored()
        self._open_ring(sizes)

    # -- the ways in ---------------------------------------------------------------------------------------------------------

    def __call__(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        """Each layer on what the one before returned; further arguments go to all."""
        with torch.no_grad():
            for layer in self.layers:
                x = layer.module(x, *args, **kwargs)
        return x

    def undo(self) -> None:
        """Put weights and buffers back where they were. A second time it does nothing."""
        if not self.layers:
            return
        self._drop_all()
        self.wait()
        self._source.close()
        for layer in reversed(self.layers):
            layer.undo()
        self.layers, self._modules, self._order = [], [], []
        self._places.clear()
        self._unused.clear()
        self._room = torch.empty(0)

    def __str__(self) -> str:
        gib = 2.0**30
        return (
            f"{len(self.layers) - len(self.streamed)} of {len(self.layers)} layers stay on {self.device} "
            f"({self.device_bytes / gib:.2f} GiB with the ring); {self.sent_bytes / gib:.2f} GiB a pass {self.transit}"
        )

    # -- the ring ------------------------------------------------------------------------------------------------------------

    def _stored(self) -> PinnedSource | DiskSource:
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
                write_bytes(stretch, files[-1])
                layer.leave(None, files[-1])
        if self._folder is None or not files:
            return PinnedSource(stretches, is_pinned=is_gpu)
        sizes = [layer.plan.sent_bytes for layer in self._order]
        return DiskSource(files, sizes, num_buffers=self.num_buffers + 1, is_pinned=is_gpu)

    def _open_ring(self, sizes: Sequence[LayerSizes]) -> None:
        num = min(self.num_buffers, len(self._order))
        largest = max((sizes[i].sent for i in self.streamed), default=0)
        room = max((sizes[i].expanded for i in self.streamed), default=0)
        self._room = torch.empty(room, dtype=torch.uint8, device=self.device)
        self._places: list[RingPlace] = [
            RingPlace(i, torch.empty(largest, dtype=torch.uint8, device=self.device), self._coming) for i in range(num)
        ]
        for layer in self._order:
            layer.arrivals = [Arrival(layer.plan, place.memory, self._room) for place in self._places]
        for order, layer in enumerate(self._order):
            layer.order = order
        for place in self._places:
            place.free()  # memory that torch gives anew may still be in use on the current stream
        self._unused: deque[RingPlace] = deque(self._places)

    @contextmanager
    def _brought(self, layer: StreamedLayer) -> Iterator[dict[str, nn.Parameter]]:
        """The weights of a layer, for what is queued inside; the next ones are on their way."""
        self._require_layers()
        self._begin_at(layer.order)
        flight = self._here[layer.order]
        try:
            flight.wait()
        except CheckpointError:
            self._drop_all()
            raise
        flight.place.wait()
        arrival = layer.arrivals[flight.place.number]
        arrival.expand()
        if layer.plan.expanded_bytes:  # the place is free already
            self._pass_on(layer.order, flight)
        try:
            yield arrival.weights
        finally:
            if not layer.plan.expanded_bytes:
                self._pass_on(layer.order, flight)

    def _begin_at(self, order: int) -> None:
        """As many as there are places, round and round: the first layers of the next pass come while this one ends."""
        self._move_window([(order + i) % len(self._order) for i in range(len(self._places))])

    def _pass_on(self, order: int, flight: _Flight) -> None:
        """The layer has been queued; its place is for the next one."""
        if self._here.get(order) is flight:
            flight.place.free()
            self._drop(order)
            self._begin_at(order + 1)

    def _send(self, number: int) -> _Flight:
        layer, place = self._order[number], self._unused.popleft()
        self.bytes_in += layer.plan.sent_bytes
        return _Flight(place, self._source.send(number, place), layer.versions())

    def _free(self, number: int, sent: _Flight) -> None:
        with suppress(CheckpointError):  # raised for whoever needs that layer
            sent.wait()
        self._unused.append(sent.place)

    # -- how long a pass takes -----------------------------------------------------------------------------------------------

    def predict(self, x: Any, *args: Any, seconds: float = 2.0, **kwargs: Any) -> PassPrediction:
        """What a pass on these inputs will take, from the link and one layer of each kind, measured alone. Also `prediction`.

        One pass runs first, which also records the inputs of each kind of layer.
        """
        self._require_layers()
        inputs: dict[tuple[object, ...], Any] = {}
        kinds = [kind_of(layer) for layer in self.layers]
        with torch.no_grad():
            for layer, kind in zip(self.layers, kinds, strict=True):
                inputs.setdefault(kind, x)
                x = layer.module(x, *args, **kwargs)
            rate = self._link_bytes_per_s(seconds / 2)
            share_s = seconds / 2 / len(inputs)
            computing = {
                kind: compute_s(
                    self.layers[kinds.index(kind)], (first, *args), kwargs, device=self.device, max_time_s=share_s
                )
                for kind, first in inputs.items()
            }
        timed = [
            Timed(
                computing[kind],
                layer.plan.sent_bytes / rate if layer.is_streamed and rate else None,
                bool(layer.plan.expanded_bytes),
            )
            for layer, kind in zip(self.layers, kinds, strict=True)
        ]
        all_compute_s = sum(layer.compute_s for layer in timed)
        copy_s = sum(layer.send_s or 0.0 for layer in timed)
        # On a CPU copies are the processor's work, too. A sum in another order may be a rounding less than the bound.
        overlapped_s = max(pass_s(timed, num_buffers=self.num_buffers), copy_s, all_compute_s)
        whole_s = copy_s + all_compute_s if self.device.type == "cpu" else overlapped_s
        self.prediction = PassPrediction(
            num_layers=len(timed),
            num_resident=len(timed) - len(self.streamed),
            transit=self.transit,
            device_bytes=self.device_bytes,
            sent_bytes=self.sent_bytes,
            link_bytes_per_s=rate,
            copy_s=copy_s,
            compute_s=all_compute_s,
            bound_s=max(copy_s, all_compute_s),
            pass_s=whole_s,
            exposed_s=whole_s - max(copy_s, all_compute_s),
        )
        return self.prediction

    def measured(self, x: Any, *args: Any, seconds: float = 5.0, **kwargs: Any) -> PassMeasurement:
        """What a pass takes, of passes one after the other, beside the prediction if there is one."""
        self._require_layers()
        timing = time_call(
            lambda: self(x, *args, **kwargs),
            device=self.device,
            min_time_s=seconds / 2,
            max_time_s=seconds,
            warmup=1,
        )
        found, before = timing.call_s, self.prediction
        return PassMeasurement(
            pass_s=found.value,
            low_s=found.low,
            high_s=found.high,
            num_passes=found.num_samples,
            bound_fraction=None if before is None else before.bound_s / found.value,
            error_fraction=None if before is None else found.value / before.pass_s - 1,
        )

    def _require_layers(self) -> None:
        if not self.layers:
            raise UsageError("these layers are no longer streamed, since undo was called; stream them anew")

    def _link_bytes_per_s(self, seconds: float) -> float:
        """Of sending some layers one after the other with nothing else to do; 0 where nothing is sent."""
        layers = self._order[:_MOST_SENDS]
        if not layers:
            return 0.0
        self._drop_all()
        self.wait()

        def send() -> None:
            for i in range(len(layers)):
                self._source.send(i, self._places[i % len(self._places)])()
            self.wait()

        timing = time_call(send, clock=HostClock(), min_time_s=seconds / 4, max_time_s=seconds, warmup=1)
        return sum(layer.plan.sent_bytes for layer in layers) / timing.call_s.value


class _Flight(NamedTuple):
    """A layer on its way to a place; its weights' versions when it was sent."""

    place: RingPlace
    wait: Callable[[], None]
    versions: list[int]


def _limit(device: torch.device, limit_bytes: int | None) -> int | None:
    if limit_bytes is not None or device.type != "cuda":
        return limit_bytes
    free, total = torch.cuda.mem_get_info(device)
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(free + cached - total // 10)
