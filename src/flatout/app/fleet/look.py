"""One look into the steps of a running job, and what it found."""

from __future__ import annotations

import os
from collections.abc import Callable
from time import perf_counter
from typing import Final

import torch
from torch.optim.optimizer import Optimizer

from flatout.app.fleet.findings import with_diagnosis
from flatout.app.fleet.identity import JobPlace
from flatout.app.session import diagnose_all
from flatout.check.capture import Capture
from flatout.check.observe.discovery import import_collectors
from flatout.check.observe.observer import is_observed
from flatout.check.observe.steps.schedule import Schedule
from flatout.core.records.distributed import Place
from flatout.core.records.evidence import Evidence
from flatout.core.records.job import JobRecord
from flatout.core.registry import rules
from flatout.core.runtime.garbage_collector import collections_put_off
from flatout.core.runtime.script import error_line

_SCHEDULE: Final = Schedule(
    observe_s=8.0, num_light_on_device=10, num_deep=2, deep_budget_s=20.0, trials_budget_s=0.0, compile_budget_s=0.0
)
"""Few steps, none of them twice: two deep ones are the fewest that show what is computed anew in each. Nothing is tried."""


def import_all() -> None:
    """Import what a look and its diagnosis need."""
    import_collectors()
    rules()


class JobLook:
    """Observes some steps of the training in whose thread it is started; `on_end` is called there once it is over."""

    def __init__(self, place: JobPlace, record: JobRecord, on_end: Callable[[JobLook], None]) -> None:
        self.record = record
        self.failure = ""
        self.spent_s = 0.0
        self._on_end = on_end
        self._is_over = False
        self._capture = Capture(
            command=(record.name,),
            cwd=os.getcwd(),
            schedule=_SCHEDULE,
            machine=None,
            propose=lambda _: (),
            publish=self._publish,
            place=Place(place.rank, place.world_size) if place.world_size > 1 else None,
        )

    def start(self, optimizer: Optimizer) -> str:
        """Begin with the next step; why not, where that cannot be."""
        if is_observed():
            return "its steps are observed already"
        try:
            self._capture.start([optimizer])
        except BaseException:
            self._capture.abandon()  # nothing of ours stays on the training
            raise
        return ""

    def finish(self) -> None:
        """The process ends: take what there is."""
        if not self._is_over:
            self._publish(self._capture.finish(exit="", exit_code=None))

    def _publish(self, evidence: Evidence) -> None:
        if self._is_over:
            return
        self._is_over = True
        began = perf_counter()
        try:
            if not evidence.steps.num_timed or not evidence.operators:
                self.failure = next(iter(evidence.notes), "no step could be observed")
            else:
                with collections_put_off():
                    diagnosis = diagnose_all(evidence)
                has_tf32 = torch.cuda.is_available() and torch.get_float32_matmul_precision() != "highest"
                self.record = with_diagnosis(self.record, evidence, diagnosis, has_tf32=has_tf32)
        except Exception as e:  # noqa: BLE001  # ours; the record says so
            self.failure = f"its diagnosis failed: {error_line(e)}"
        finally:
            self.spent_s = self._capture.added_s() + perf_counter() - began
            self._on_end(self)
