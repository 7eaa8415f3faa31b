"""A callback of transformers' Trainer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.optim import Optimizer
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from flatout.app.session import Checked
from flatout.callbacks.watched_training import WatchedTraining
from flatout.core.records.distributed import Place
from flatout.core.records.hardware import Machine


class TrainerReport(TrainerCallback):
    """Watches some steps of a Trainer's training, and prints what makes them slow: line, cost, gain, edit.

    Weights, random numbers and global switches stay as they are without it. A training that raises leaves its report when the
    next one begins, when the process ends, or by `finish`.

    Args:
        log: What takes the figures of the report, such as `trainer.log`, which passes them on to the loggers of `report_to`.
            A callback does not know its trainer; without this the figures are in `trainer.state.log_history` alone.
        observe_s: Seconds of light observation, after which nothing is watched any more.
        trials_s: Seconds that the training may wait while cures are tried on its inputs. 0: gains are estimated.
        machine: What `flatout.measure_machine()` returned; without it the report has no roofline.
        html: The file for the report as one HTML page, written when the training ends.
        json: The file for the report as JSON, written as soon as it is known.

    Raises:
        UsageError: An argument is out of range, or a file cannot be written there.
    """

    def __init__(
        self,
        *,
        log: Callable[[dict[str, float]], object] | None = None,
        observe_s: float = 10.0,
        trials_s: float = 0.0,
        machine: Machine | None = None,
        html: str | Path | None = None,
        json: str | Path | None = None,
    ) -> None:
        self._log = log
        self._training = WatchedTraining(
            "transformers.Trainer", observe_s=observe_s, trials_s=trials_s, machine=machine, html=html, json=json
        )

    @property
    def checked(self) -> Checked | None:
        """The evidence and the diagnosis of the last training; None until they are known."""
        return self._training.checked

    def finish(self) -> None:
        """Report now what there is of a training that was interrupted, and watch no more of it."""
        self._training.finish("interrupted")

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Begin to watch, on the first rank."""
        optimizer = kwargs.get("optimizer")
        known = (optimizer,) if isinstance(optimizer, Optimizer) else ()
        self._training.start(Place(args.process_index, args.world_size), known)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Log the figures once they are known; here, since logging at the end of a step would take the place of its own log."""
        self._log_figures(state)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Report what there is, and what watching took."""
        self._training.finish()
        self._log_figures(state)

    def _log_figures(self, state: TrainerState) -> None:
        figures = self._training.take_figures()
        if figures and self._log is not None:
            self._log(figures)
        elif figures:
            state.log_history.append({**figures, "step": state.global_step})
