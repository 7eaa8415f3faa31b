"""Host reads and uploads: tensor methods that hand values to Python or move data to a device, in a step of their own."""

from __future__ import annotations

import statistics
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from threading import get_ident
from time import perf_counter
from typing import Any, Final, NamedTuple, cast

import msgspec
from torch import Tensor

from flatout.check.observe.collector import Collector
from flatout.check.observe.discovery import CollectorEntry
from flatout.check.observe.observation import ObservationState
from flatout.check.observe.steps.schedule import Mode
from flatout.core.records.evidence import Evidence, HostRead, Phase
from flatout.core.records.usage import CallUse
from flatout.core.runtime.patches import Patches

_METHODS: Final = (
    "item", "tolist", "cpu", "numpy", "to", "nonzero", "masked_select", "unique",
    "__bool__", "__float__", "__int__", "__index__", "__format__", "__repr__", "cuda", "copy_",
)  # fmt: skip
_UPLOADS: Final = ("to", "cuda", "copy_")


class ReadSite(NamedTuple):
    """Where and how, and whether the tensor was on a device."""

    site: int
    call: str
    phase: str
    on_device: bool


class UploadSite(NamedTuple):
    """Where memory of the host was copied to a device, from which kind of memory, and whether the call waited for it."""

    site: int
    call: str
    phase: str
    is_pinned: bool
    is_async: bool


class HostReads(Collector):
    """Wraps the methods of Tensor that read values or copy to a device, only in READS steps."""

    def __init__(self, observation: ObservationState) -> None:
        self.reads: dict[ReadSite, list[float]] = {}
        self.uploads: dict[UploadSite, list[tuple[int, float]]] = {}
        """(bytes, seconds of the host) of each copy."""
        self.num_steps = 0
        self.own_s = 0.0
        """Seconds that watching took so far besides what it watched: who times what reads inside takes them off."""
        self._observation = observation
        self._sites = observation.sites
        self._phase = observation.phase
        self._patches = Patches()
        self._inside = False
        self._thread_id = get_ident()

    def begin(self, mode: Mode) -> None:
        """Wrap the methods in a READS step."""
        if mode is Mode.READS:
            for name in _METHODS:
                self._patches.set(Tensor, name, self._wrap(name, getattr(Tensor, name)))

    def end(self, mode: Mode) -> None:
        """Put the original methods back."""
        if mode is Mode.READS:
            self._patches.undo()
            self.num_steps += 1

    def restart(self) -> None:
        """Put the methods back, and forget what they read."""
        self._patches.undo()
        self.reads.clear()
        self.uploads.clear()
        self.num_steps = 0

    def remove(self) -> None:
        """Put the original methods back."""
        self._patches.undo()

    # -- what came of it --------------------------------------------------------------------------------------------------

    def host_reads(self) -> tuple[HostRead, ...]:
        """Reads by line from the steps that watched for them, and those only operators show (boolean indexing and the like)."""
        n = max(1, self.num_steps)
        rows = {read: (len(times) / n, sum(times) / n) for read, times in self.reads.items()}
        timed = {read.site for read in rows}
        steps = self._observation.deep.steps
        for read, count in Counter(ReadSite(*read) for step in steps for read in step.reads).items():
            if read.site not in timed and read.site >= 0:
                rows[read] = (count / len(steps), 0.0)
        return tuple(
            HostRead(
                source=read.site,
                call=read.call,
                calls=calls,
                wait_s=wait_s,
                phase=cast(Phase, read.phase),
                on_device=read.on_device,
            )
            for read, (calls, wait_s) in rows.items()
        )

    def fill(self, evidence: Evidence) -> Evidence:
        """Add `host_reads`, and to `uses` the copies to a device and the tensors converted to arrays and lists."""
        uses = (*evidence.uses, *self._conversions(), *self._uploads())
        return msgspec.structs.replace(evidence, host_reads=self.host_reads(), uses=uses)

    def _conversions(self) -> Iterator[CallUse]:
        n = max(1, self.num_steps)
        for read, times in self.reads.items():
            if read.call in ("numpy", "tolist"):
                yield CallUse(
                    name=f"Tensor.{read.call}",
                    source=read.site,
                    calls=len(times) / n,
                    seconds=sum(times) / n,
                    phase=read.phase,
                )

    def _uploads(self) -> Iterator[CallUse]:
        """Copies from the host's memory to a device, by line."""
        n = max(1, self.num_steps)
        for upload, copies in self.uploads.items():
            kind = f"{'pinned' if upload.is_pinned else 'pageable'} {'async' if upload.is_async else 'blocking'}"
            yield CallUse(
                name=f"Tensor.{upload.call}",
                source=upload.site,
                calls=len(copies) / n,
                seconds=sum(s for _, s in copies) / n,
                bytes=round(statistics.fmean(b for b, _ in copies)),
                detail=f"host-to-device {kind}",
                phase=upload.phase,
            )

    # -- watching ---------------------------------------------------------------------------------------------------------

    def _wrap(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def reading(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            if self._inside or get_ident() != self._thread_id:
                return original(tensor, *args, **kwargs)
            entered = perf_counter()
            self._inside = True
            source = args[0] if name == "copy_" and args else tensor
            start = perf_counter()
            try:
                result = original(tensor, *args, **kwargs)
            finally:
                self._inside = False
            seconds = perf_counter() - start
            if name in _UPLOADS and is_upload(source, result):
                is_async = bool(kwargs.get("non_blocking", any(a is True for a in args)))
                self._note_upload(name, source, seconds, is_async=is_async)
            elif name != "cuda":
                self._note(name, source if isinstance(source, Tensor) else tensor, result, seconds)
            self.own_s += perf_counter() - entered - seconds
            return result

        return reading

    def _note_upload(self, name: str, source: Tensor, seconds: float, *, is_async: bool) -> None:
        site = self._sites.of_frame(sys._getframe(2))
        if site >= 0:
            upload = UploadSite(site, name, self._phase(), source.is_pinned(), is_async)
            size = source.numel() * source.element_size()
            self.uploads.setdefault(upload, []).append((size, seconds))

    def _note(self, name: str, tensor: Tensor, result: Any, seconds: float) -> None:
        on_device = tensor.device.type not in ("cpu", "meta")
        if name in ("to", "copy_") and not (on_device and isinstance(result, Tensor) and result.device.type == "cpu"):
            return
        if name == "__repr__" and tensor.numel() == 0:
            return
        frame = sys._getframe(2)
        site = self._sites.of_frame(frame)
        is_torchs_own = frame.f_globals.get("__name__", "").startswith("torch.")
        if site >= 0 and not is_torchs_own:
            call = name.strip("_") if name != "__repr__" else "print"
            self.reads.setdefault(ReadSite(site, call, self._phase(), on_device), []).append(seconds)


def is_upload(source: object, result: object) -> bool:
    """Whether `result` is a tensor on a device that was copied from the host's memory."""
    return (
        isinstance(source, Tensor)
        and isinstance(result, Tensor)
        and source.device.type == "cpu"
        and result.device.type not in ("cpu", "meta")
    )


COLLECTOR: Final = CollectorEntry(HostReads)
