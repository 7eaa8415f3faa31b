"""DistributedDataParallel modules: their settings, their buckets, and what their gradient synchronisation takes.

The reducer launches its collectives from C++, where no wrapper sees them. DDP keeps its own time stamps of the backward's end and
of the end of the communication for its logs; they are read here. No communication hook is registered: that would change the run.
"""

from __future__ import annotations

import statistics
import sys
import weakref
from collections.abc import Callable
from time import perf_counter
from typing import Any, Final

from torch.nn.parallel import DistributedDataParallel

from flatout.check.observe.ranks.collectives import CollectiveKey, Collectives, Totals
from flatout.core.records.distributed import Replication
from flatout.core.runtime.patches import Patches
from flatout.core.runtime.source_sites import Sites

GRADIENTS: Final = "ddp.gradients"
_USUAL_RATE: Final = 100
"""DDP takes its stamps in the first ten iterations and in every hundredth (reducer.hpp, kDDPRuntimeLoggingSampleRate)."""
_ALL_UNTIL: Final = 256
_EVERY: Final = 8
"""Reading the log costs 50 us: after the first 256 synchronisations only every eighth is read, the same ones on all ranks."""


class Replica:
    """One DDP module and its reducer's synchronisations."""

    def __init__(self, module: DistributedDataParallel, site: int, *, on_device: bool) -> None:
        self.module = weakref.ref(module)
        self.site = site
        self.on_device = on_device
        self.is_sampling = False
        self.backward_site = -1
        self.is_prepared = False
        self.num_syncs = 0
        self.search_s = 0.0
        self.exposed_s: list[float] = []
        self.has_unused: bool | None = None
        self.settings: dict[str, Any] = {}
        self.iteration = -1
        self.waiting: list[Totals] = []
        """Rows of the synchronisation whose times the log does not hold yet."""

    @property
    def bucket_bytes(self) -> tuple[int, ...]:
        """Sizes of the buckets that are in use, in the order of their reduction."""
        text = str(self.settings.get("rebuilt_bucket_sizes") or self.settings.get("bucket_sizes") or "")
        return tuple(int(size) for size in text.split(", ") if size.strip().isdigit())


class Replications:
    """Watches DDP's reducers: when a synchronisation is prepared, and what DDP's own log has of the one before."""

    def __init__(self, sites: Sites, collectives: Collectives) -> None:
        self.replicas: dict[int, Replica] = {}
        self.is_active = False
        self._sites = sites
        self._collectives = collectives

    def install(self, patches: Patches) -> None:
        """Note DDP modules as they are constructed, and time `Reducer.prepare_for_backward`."""
        from torch._C._distributed_c10d import Reducer

        construct: Callable[..., None] = DistributedDataParallel.__init__
        prepare: Callable[..., Any] = Reducer.prepare_for_backward
        watch = self

        def __init__(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
            construct(self, *args, **kwargs)
            watch._add(self, watch._sites.of_frame(sys._getframe(1)))

        def prepare_for_backward(reducer: Any, *args: Any, **kwargs: Any) -> Any:
            start_s = perf_counter()
            result = prepare(reducer, *args, **kwargs)
            watch._prepared(reducer, perf_counter() - start_s)
            return result

        patches.set(DistributedDataParallel, "__init__", __init__)
        patches.set(Reducer, "prepare_for_backward", prepare_for_backward)

    def clear(self) -> None:
        """A better border of steps was found: forget what was counted."""
        for replica in self.replicas.values():
            replica.num_syncs = 0
            replica.search_s = 0.0
            replica.exposed_s.clear()

    def end_backward(self, site: int) -> None:
        """A backward pass ended: every module prepared for it has synchronised its gradients."""
        for replica in self.replicas.values():
            if not replica.is_prepared:
                continue
            replica.is_prepared = False
            replica.num_syncs += 1
            replica.backward_site = site
            buckets = replica.bucket_bytes
            key = self._collectives.key_of(GRADIENTS, None, None, "torch.nn.parallel")
            totals = self._collectives.totals(CollectiveKey(GRADIENTS, site, "backward", *key[3:]))
            totals.num += max(1, len(buckets))
            totals.bytes += sum(buckets)
            totals.num_open += 1
            replica.waiting.append(totals)

    def stop_sampling(self, *, only_devices: bool) -> None:
        """Let DDP take its stamps as seldom as it does by itself."""
        for replica in self.replicas.values():
            module = replica.module()
            if replica.is_sampling and module is not None and (replica.on_device or not only_devices):
                replica.is_sampling = False
                module._set_ddp_runtime_logging_sample_rate(_USUAL_RATE)

    def records(self, num_steps: int) -> tuple[Replication, ...]:
        """The modules that synchronised, per step of the `num_steps` that were counted."""
        rows = []
        for replica in self.replicas.values():
            data = replica.settings
            if not data or not replica.num_syncs:
                continue
            module = replica.module()
            rows.append(
                Replication(
                    source=replica.site,
                    bucket_bytes=replica.bucket_bytes,
                    find_unused_parameters=bool(data.get("find_unused_parameters")),
                    has_unused_parameters=replica.has_unused,
                    static_graph=bool(getattr(module, "static_graph", data.get("static_graph", False))),
                    gradient_as_bucket_view=bool(data.get("gradient_as_bucket_view")),
                    syncs_per_step=replica.num_syncs / max(1, num_steps),
                    backward_source=replica.backward_site,
                    exposed_per_sync_s=statistics.median(replica.exposed_s) if replica.exposed_s else None,
                    search_s=replica.search_s / max(1, num_steps),
                    bucket_cap_bytes=int(data.get("bucket_cap_bytes", 0)),
                )
            )
        return tuple(rows)

    def _add(self, module: DistributedDataParallel, site: int) -> None:
        on_device = any(p.is_cuda for p in module.parameters())
        replica = Replica(module, site, on_device=on_device)
        # On a CPU a stamp is a look at the clock. On a device DDP waits for its events when it reads them, as it does in
        # the first ten iterations anyway; `stop_sampling` ends that before the undisturbed steps.
        module._set_ddp_runtime_logging_sample_rate(1)
        replica.is_sampling = True
        self.replicas[id(module.reducer)] = replica

    def _prepared(self, reducer: Any, seconds: float) -> None:
        replica = self.replicas.get(id(reducer))
        if replica is None or not self.is_active or self._collectives.is_fenced:
            return
        replica.is_prepared = True
        replica.search_s += seconds
        self._read(replica)

    def _read(self, replica: Replica) -> None:
        """File the log's times of the synchronisation before this one."""
        waiting, replica.waiting = replica.waiting, []
        if not waiting and replica.settings:
            return
        module = replica.module()
        is_due = replica.num_syncs <= _ALL_UNTIL or replica.num_syncs % _EVERY == 0
        data = module._get_ddp_logging_data() if module is not None and is_due else {}
        for totals in waiting:
            totals.num_open -= 1
        is_new = data.get("iteration", -1) != replica.iteration and data.get("backward_comm_time", 0) > 0
        if data:
            replica.settings = data
        if not is_new or len(waiting) != 1:
            for totals in waiting:
                totals.is_unknown = True
            return
        replica.iteration = data["iteration"]
        seconds = data["backward_comm_time"] * 1e-9
        exposed_s = max(0.0, seconds - data.get("backward_compute_comm_overlap_time", 0) * 1e-9)
        waiting[0].seconds += seconds
        waiting[0].exposed_s += exposed_s
        replica.exposed_s.append(exposed_s)
        replica.has_unused = bool(replica.has_unused) or data.get("unused_parameter_size", 0) > 0
