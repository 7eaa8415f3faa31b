"""What a region did, to be read after it, and to be printed."""

from __future__ import annotations

from time import perf_counter
from typing import Any

from flatout.core.errors import CaptureError, UsageError
from flatout.core.runtime.source_sites import Sites
from flatout.tune.verify.expect.graphs import Graphs, frame_sites
from flatout.tune.verify.expect.kernels import KernelLaunch, launches_of
from flatout.tune.verify.expect.memory import RegionPeak, allocations_of, region_peak
from flatout.tune.verify.expect.messages import mebibytes, two_columns
from flatout.tune.verify.expect.region import Region
from flatout.tune.verify.expect.tape import region_window, spots_by_number, with_spots
from flatout.tune.verify.expect.waits import Wait, device_waits


class ObservedRegion:
    """What was observed in a region of `flatout.expect`. Reading it before the region has ended raises UsageError.

    `print(observed)` gives a table. The counts are those that can be limited, under the same names.
    """

    launches: list[KernelLaunch]
    """Every kernel that ran, in order."""
    waits: list[Wait]
    """Every host wait, in order."""
    peak: RegionPeak
    """The peak with the device it was on, and what was live there."""
    graphs: Graphs
    """All that was observed of torch.compile."""
    sites: Sites
    """The lines that indices stand for."""
    observing_s: float
    """Seconds that starting and reading the profiler took, outside the region's own time."""

    def __getattr__(self, name: str) -> Any:
        if name in type(self).__annotations__:  # not set yet
            raise UsageError("nothing has been observed yet: read it after the region of `flatout.expect` has ended")
        raise AttributeError(name)

    def _read(self, region: Region) -> None:
        """End the region, and read what the profiler, dynamo and the modes recorded of it."""
        start = perf_counter()
        graphs = region.leave()
        has_device_events = any(segment.on_devices for segment in region.segments)
        if "cuda" in region.devices and not has_device_events:
            raise CaptureError(
                "the region used a CUDA device, and the profiler saw nothing of it: the driver does not let this process "
                "profile, or another profiler holds the device; allow it (NVreg_RestrictProfilingToAdminUsers=0), or end that one"
            )
        frames = frame_sites(region.sites)
        stretches = [(segment, with_spots(segment, frames)) for segment in region.segments]
        self.sites = region.sites
        self.graphs = graphs(spot.compiled for _, events in stretches for _, spot in events if spot.compiled)
        self.launches = [launch for stretch in stretches for launch in launches_of(*stretch)]
        is_device = any(launch.ran == "kernel" for launch in self.launches)
        if not is_device:
            self.launches += region.on_other_threads
        self.peak = region_peak(a for _, events in stretches for a in allocations_of(events))
        self.waits = region.reads
        if is_device or has_device_events or region.devices - {"cpu", "meta"}:
            self.waits = [
                wait
                for segment, events in stretches
                for wait in device_waits(segment.on_devices, spots_by_number(events), region_window(segment))
            ]
        self.observing_s = region.entering_s + perf_counter() - start

    @property
    def forward_kernels(self) -> int:
        """Kernels that ran while no backward did."""
        return sum(not launch.is_backward for launch in self.launches)

    @property
    def backward_kernels(self) -> int:
        """Kernels that ran in backwards."""
        return sum(launch.is_backward for launch in self.launches)

    @property
    def peak_bytes(self) -> int:
        """The most bytes that allocations of the region had live at one moment."""
        return self.peak.bytes

    @property
    def host_waits(self) -> int:
        """Calls in which the host waited for a device; on a CPU, those in which it would."""
        return len(self.waits)

    @property
    def graph_breaks(self) -> int | None:
        """Places where compiled functions were cut into several graphs; None where nothing was compiled."""
        return len(self.graphs.breaks) if self.graphs.is_compiled else None

    @property
    def recompilations(self) -> int | None:
        """Times that a function was compiled again for other inputs; None where nothing was compiled."""
        return len(self.graphs.recompilations) if self.graphs.is_compiled else None

    @property
    def compilations(self) -> int:
        """Frames that were compiled in the region, the first time or again."""
        return self.graphs.num_compiled

    def __str__(self) -> str:
        graphs = self.graphs
        rows = [
            ("forward_kernels", str(self.forward_kernels)),
            ("backward_kernels", str(self.backward_kernels)),
            ("peak_bytes", f"{self.peak_bytes} ({mebibytes(self.peak_bytes)}, {self.peak.device})"),
            ("host_waits", str(self.host_waits)),
            ("graph_breaks", _count(self.graph_breaks)),
            ("recompilations", _count(self.recompilations)),
        ]
        if graphs.num_compiled:
            rows.append(("compiled in it", f"{graphs.num_compiled} frames, {graphs.compile_s:.1f} s"))
        rows.append(("observing took", f"{self.observing_s:.2f} s"))
        return two_columns(rows)

    def __repr__(self) -> str:
        return str(self) if "observing_s" in vars(self) else "<nothing observed yet>"


def _count(number: int | None) -> str:
    return "nothing was compiled" if number is None else str(number)
