"""What a region did, to be read after it, and to be printed."""

from __future__ import annotations

from flatout.errors import UsageError
from flatout.profiling.sites import Sites
from flatout.verification.promises.graphs import Graphs
from flatout.verification.promises.kernels import Launch
from flatout.verification.promises.memory import Peak
from flatout.verification.promises.region import Observed
from flatout.verification.promises.telling import mebibytes, table
from flatout.verification.promises.waits import Wait


class Seen:
    """What was seen in a region of `flatout.guarantee`. Reading it before the region has ended raises UsageError.

    `print(seen)` gives a table. The counts are those that can be promised, under the same names.
    """

    def __init__(self) -> None:
        self._observed: Observed | None = None
        self._sites = Sites()

    def _fill(self, observed: Observed, sites: Sites) -> None:
        self._observed, self._sites = observed, sites

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
        """The most bytes that allocations of the region held at one moment."""
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

    @property
    def observing_s(self) -> float:
        """Seconds that starting and reading the profiler took, outside the region's own time."""
        return self._known().observing_s

    @property
    def launches(self) -> list[Launch]:
        """Every kernel, in order."""
        return self._known().launches

    @property
    def waits(self) -> list[Wait]:
        """Every host wait, in order."""
        return self._known().waits

    @property
    def peak(self) -> Peak:
        """The peak with the device it was on, and what was held there."""
        return self._known().peak

    @property
    def graphs(self) -> Graphs:
        """All that was seen of torch.compile."""
        return self._known().graphs

    @property
    def sites(self) -> Sites:
        """The lines that indices stand for."""
        return self._sites

    def _known(self) -> Observed:
        if self._observed is None:
            raise UsageError("nothing has been seen yet: read it after the region of `flatout.guarantee` has ended")
        return self._observed

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
        return table(rows)

    def __repr__(self) -> str:
        return str(self) if self._observed is not None else "<nothing seen yet>"


def _count(number: int | None) -> str:
    return "nothing was compiled" if number is None else str(number)
