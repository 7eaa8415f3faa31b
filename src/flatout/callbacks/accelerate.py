"""A tracker of Accelerate's, around a loop of the user's own."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any, Self

from accelerate import Accelerator
from accelerate.tracking import GeneralTracker
from torch.optim import Optimizer

from flatout.app.session import Checked
from flatout.callbacks.watched_training import WatchedTraining
from flatout.core.records.distributed import Place
from flatout.core.records.hardware import Machine
from flatout.core.runtime.script import error_line


class AccelerateReport(GeneralTracker):  # type: ignore[misc]  # accelerate ships no types
    """Watches some steps of a loop under Accelerate, and prints what makes them slow: line, cost, gain, edit.

    Used as `with AccelerateReport(accelerator):` around the loop, like `accelerator.profile()`. Where a loop is not to be
    indented, `AccelerateReport(accelerator).start()` before it does the same, and `accelerator.end_training()` ends it.

    Weights, random numbers and global switches stay as they are without it. The figures of the report go to all trackers of
    the accelerator: with what the loop logs next, or at the end.

    Args:
        accelerator: The one that prepared the model; its `init_trackers` was called before, where there are trackers.
        observe_s: Seconds of light observation, after which nothing is watched any more.
        trials_s: Seconds that the training may wait while cures are tried on its inputs. 0: gains are estimated.
        machine: What `flatout.measure_machine()` returned; without it the report has no roofline.
        html: The file for the report as one HTML page, written when the loop ends.
        json: The file for the report as JSON, written as soon as it is known.

    Raises:
        UsageError: An argument is out of range, or a file cannot be written there.
    """

    name = "flatout"
    requires_logging_directory = False

    def __init__(
        self,
        accelerator: Accelerator,
        *,
        observe_s: float = 10.0,
        trials_s: float = 0.0,
        machine: Machine | None = None,
        html: str | Path | None = None,
        json: str | Path | None = None,
    ) -> None:
        super().__init__()
        self._accelerator = accelerator
        self._step: int | None = None
        """The step that the loop logged last."""
        self._training = WatchedTraining(
            "accelerate", observe_s=observe_s, trials_s=trials_s, machine=machine, html=html, json=json
        )

    @property
    def tracker(self) -> Checked | None:
        """The report, as Accelerate's `get_tracker("flatout", unwrap=True)` returns it."""
        return self.checked

    @property
    def checked(self) -> Checked | None:
        """The evidence and the diagnosis of the last loop; None until they are known."""
        return self._training.checked

    def start(self) -> None:
        """Begin to watch, on the first rank; called again while it watches it does nothing."""
        accelerator = self._accelerator
        if self._training.is_watched:
            return
        if self not in accelerator.trackers:
            # Before the others, which are closed one after the other when the training ends: they are to get the figures.
            accelerator.trackers.insert(0, self)
        known = [o for o in accelerator._optimizers if isinstance(o, Optimizer)]
        self._training.start(Place(accelerator.process_index, accelerator.num_processes), known)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Pass the figures on to the other trackers once they are known; what the loop logs is theirs."""
        self._step = step
        self._log_figures()

    def finish(self) -> None:
        """Report what there is, and what watching took."""
        self._end("finished")

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._end("finished" if error is None else error_line(error))
        if self in self._accelerator.trackers:
            self._accelerator.trackers.remove(self)

    def _end(self, exit: str) -> None:
        self._training.finish(exit)
        self._log_figures()

    def _log_figures(self) -> None:
        if figures := self._training.take_figures():
            self._accelerator.log(figures, step=self._step)
