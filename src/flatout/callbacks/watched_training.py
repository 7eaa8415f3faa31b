"""A library's training, watched for some steps in this process and reported."""

from __future__ import annotations

import atexit
import os
import sys
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import Final

import msgspec
from torch.optim import Optimizer

from flatout.app.cli.terminal import open_console, print_lines
from flatout.app.outputs import Outputs, why_not_writable
from flatout.app.session import Checked, diagnose_all
from flatout.callbacks.figures import figures_of
from flatout.check.capture import Capture
from flatout.check.observe.discovery import import_collectors
from flatout.check.observe.observer import is_observed
from flatout.check.observe.steps.schedule import Schedule
from flatout.check.stakes import proposed_trials
from flatout.core import units
from flatout.core.errors import EXTRA_OF, FlatoutError, UsageError, explained
from flatout.core.records.distributed import Place
from flatout.core.records.evidence import Evidence
from flatout.core.records.hardware import Machine
from flatout.core.registry import rules
from flatout.core.runtime.garbage_collector import collections_put_off
from flatout.core.runtime.script import error_line
from flatout.report.parts.diagnosis import diagnosis_blocks
from flatout.report.text import terminal_report

_NUM_DEEP: Final = 2
"""Steps whose every operator is recorded take three times as long (a transformer, two cores of an EPYC), and the training waits
for them. Two are the fewest that show what is computed anew in each."""

_WIDTH: Final = 100
"""Columns of the printed report at most, as on the command line."""

_current: list[WatchedTraining] = []
"""The training that is watched in this process now; at most one, since all watching patches the same classes."""


class WatchedTraining:
    """What all callbacks have in common: watches one training after another, and reports each.

    The report is printed as soon as enough steps were watched, or when the training ends before; nothing is watched from then
    on. A mistake of ours is printed in one line and never raised into a training that runs.
    """

    def __init__(
        self,
        command: str,
        *,
        observe_s: float,
        trials_s: float,
        machine: Machine | None,
        html: str | Path | None,
        json: str | Path | None,
    ) -> None:
        """Check the arguments, which are those of the callbacks; `command` names what runs the training in the report.

        Raises UsageError when a number is out of range or a file cannot be written in the end.
        """
        if not observe_s > 0:
            raise UsageError(f"observe_s={observe_s} must be above 0")
        if not trials_s >= 0:
            raise UsageError(f"trials_s={trials_s} must be at least 0; 0 tries nothing")
        self._files = Outputs(json=_writable("json", json), html=_writable("html", html))
        if html is not None:
            _require_extra("html")
        self._command = command
        # Trials that compile take from the same seconds: what is asked for is all that the training waits.
        self._schedule = Schedule(
            observe_s=observe_s, num_deep=_NUM_DEEP, trials_budget_s=trials_s, compile_budget_s=trials_s
        )
        self._machine = machine
        import_collectors()  # here, and the rules, since the training would wait for it
        rules()
        self.checked: Checked | None = None
        """The report of the last training, None until it is known."""
        self._figures: dict[str, float] = {}
        self.is_watched = False
        """Whether a training has begun that is not over."""
        self._capture: Capture | None = None
        """There until the report is known."""
        self._place = Place(0, 1)
        self._pid = 0
        self._began_s = self._own_s = 0.0

    def start(self, place: Place, optimizers: Iterable[Optimizer] = ()) -> None:
        """A training begins in this thread; `optimizers` are those it will step, as far as they are known.

        Of several ranks the first is watched, the others do nothing. A training that is still watched is taken to have ended.
        """
        for before in list(_current):
            before.finish("another training began")
        if place.rank:
            return
        if is_observed():
            print_lines(f"flatout: {self._command} is observed already; its callback does nothing", stderr=True)
            return
        self._began_s, self._own_s = perf_counter(), 0.0
        self.checked, self._figures, self._place = None, {}, place
        with _printing_mistakes():
            capture = Capture(
                command=(self._command,),
                cwd=os.getcwd(),
                schedule=self._schedule,
                machine=self._machine,
                propose=lambda evidence: proposed_trials(evidence, rules()),
                publish=self._publish,
                place=place if place.world_size > 1 else None,
            )
            try:
                capture.start(optimizers)
                self._capture, self._pid, self.is_watched = capture, os.getpid(), True
            finally:
                if not self.is_watched:
                    capture.abandon()
        if self.is_watched:
            _current.append(self)
            atexit.register(self._finish_at_exit)

    def take_figures(self) -> dict[str, float]:
        """What the loggers get of a report that has become known; empty before and after that."""
        figures, self._figures = self._figures, {}
        return figures

    def finish(self, exit: str = "finished") -> None:
        """The training is over: report it, if that was not done before, and say what watching took.

        `exit` is 'finished', or the line that says why the training ended otherwise. Nothing is done where nothing is watched.
        """
        if not self.is_watched:
            return
        self.is_watched = False
        atexit.unregister(self._finish_at_exit)
        _current.remove(self)
        if os.getpid() != self._pid:  # a forked child, in which nothing is watched
            return
        with _printing_mistakes():
            if self._capture is not None:
                self._report(self._capture.finish(exit=exit, exit_code=None))
        self._let_capture_go()
        if self.checked is not None:
            with self._counted(), _printing_mistakes():
                self._write(Outputs(html=self._files.html))
            run_s = perf_counter() - self._began_s
            print_lines(
                f"flatout: watching took {units.duration(self._own_s)} of the {units.duration(run_s)} of this training, "
                f"{units.percent(self._own_s / run_s)}"
            )

    def _finish_at_exit(self) -> None:
        """Python ends in a training that nothing reported as over: it raised, or left without its last call."""
        error = getattr(sys, "last_value", None)
        self.finish(error_line(error) if error is not None else "the process ended in the training")

    def _publish(self, evidence: Evidence) -> None:
        """Enough steps were watched, and the training goes on: nothing of theirs is held in memory any longer."""
        self._report(evidence)
        self._let_capture_go()

    def _let_capture_go(self) -> None:
        """Take all watches away, if they are not gone, and remember of the capture only what it added to the run."""
        capture, self._capture = self._capture, None
        if capture is not None:
            with _printing_mistakes():
                capture.abandon()
            self._own_s += capture.added_s()

    def _report(self, evidence: Evidence) -> None:
        """Diagnose, print, and write what is read by programs; the page is drawn at the end, since that takes a second."""
        with self._counted(), _printing_mistakes(), collections_put_off():
            evidence = self._of_first_rank(evidence)
            self.checked = Checked(evidence=evidence, diagnosis=diagnose_all(evidence))
            self._figures = figures_of(evidence)
            self._write(Outputs(json=self._files.json))
            blocks = ["", *diagnosis_blocks(evidence, self.checked.diagnosis)]
            open_console().print(terminal_report(blocks, width=_WIDTH))

    def _of_first_rank(self, evidence: Evidence) -> Evidence:
        if self._place.world_size == 1:
            return evidence
        note = f"rank 0 of {self._place.world_size} alone was watched; `flatout check --nproc` compares ranks"
        return msgspec.structs.replace(evidence, notes=(*evidence.notes, note))

    def _write(self, files: Outputs) -> None:
        if self.checked is None:
            return
        try:
            files.write(self.checked.evidence, self.checked.diagnosis)
        except FlatoutError as e:
            print_lines(f"flatout: {e}", stderr=True)

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """What is done inside is time that watching takes of the training."""
        began = perf_counter()
        try:
            yield
        finally:
            self._own_s += perf_counter() - began


@contextmanager
def _printing_mistakes() -> Iterator[None]:
    """A mistake in here is ours: it is printed, and the training goes on."""
    try:
        yield
    except Exception as e:  # noqa: BLE001  # hours of training must not be lost to a report
        where = traceback.extract_tb(e.__traceback__)[-1]
        print_lines(f"flatout: no report: {error_line(e)} ({where.name}, line {where.lineno})", stderr=True)


def _writable(name: str, path: str | Path | None) -> Path | None:
    """The path of a file to write, absolute, since a trainer may change the folder. Raises UsageError where that cannot be."""
    if path is None:
        return None
    path = Path(path).absolute()
    if because := why_not_writable(path, Path(os.path.realpath(path))):
        raise UsageError(f"{name}='{path}': {because}")
    return path


def _require_extra(extra: str) -> None:
    """Raises UsageError when a package is missing that this extra of flatout brings."""
    for module, name in EXTRA_OF.items():
        if name == extra and find_spec(module) is None:
            raise explained(ModuleNotFoundError(name=module))
