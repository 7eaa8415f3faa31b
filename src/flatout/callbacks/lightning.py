"""A callback of Lightning's Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatout.app.session import Checked
from flatout.callbacks.watched_training import WatchedTraining
from flatout.core.records.distributed import Place
from flatout.core.records.hardware import Machine
from flatout.core.runtime.script import error_line

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule, Trainer
else:
    try:
        from lightning.pytorch import Callback
    except ModuleNotFoundError:  # the same library is also installed under this name
        from pytorch_lightning import Callback


class LightningReport(Callback):
    """Watches some steps of `Trainer.fit`, and prints what makes them slow: line, cost, gain, edit.

    Weights, random numbers and global switches stay as they are without it. The figures of the report go to all loggers of the
    trainer. A training that raises or is interrupted is reported at once.

    Args:
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
        observe_s: float = 10.0,
        trials_s: float = 0.0,
        machine: Machine | None = None,
        html: str | Path | None = None,
        json: str | Path | None = None,
    ) -> None:
        self._training = WatchedTraining(
            "lightning.Trainer.fit", observe_s=observe_s, trials_s=trials_s, machine=machine, html=html, json=json
        )

    @property
    def checked(self) -> Checked | None:
        """The evidence and the diagnosis of the last training; None until they are known."""
        return self._training.checked

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin to watch, on the first rank; the sanity check of the validation is over."""
        self._training.start(Place(trainer.global_rank, trainer.world_size), trainer.optimizers)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Log the figures once they are known."""
        self._log_figures(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Report what there is, and what watching took."""
        self._training.finish()
        self._log_figures(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Report what there is of a training that raised."""
        self._training.finish(error_line(exception))

    def _log_figures(self, trainer: Trainer) -> None:
        if figures := self._training.take_figures():
            for logger in trainer.loggers:
                logger.log_metrics(figures, step=trainer.global_step)
