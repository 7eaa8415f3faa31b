"""Where a run's values go besides its folder: TensorBoard, MLflow, Weights & Biases, or what somebody else writes."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Final, Literal, Protocol

from flatout.core.errors import UsageError
from flatout.core.records.run import RunRecord


class Sink(Protocol):
    """Told of a run on its first rank: at the beginning, of each step's values as they come to the host, at the end."""

    def begin(self, record: RunRecord, path: Path) -> None:
        """A run begins; `path` is its folder. What looked like a credential is not in the record."""

    def values(self, step: int, values: Mapping[str, float]) -> None:
        """What was ticked in a step."""

    def end(self, record: RunRecord) -> None:
        """The run is over; its outcome and speed are in the record."""


class TensorBoard:
    """Event files in the run's folder, under `tensorboard/`."""

    def begin(self, record: RunRecord, path: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(path / "tensorboard"))
        table = "\n".join(f"| {name} | {value} |" for name, value in record.config.items())
        self._writer.add_text("config", f"| name | value |\n|---|---|\n{table}")

    def values(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def end(self, record: RunRecord) -> None:
        self._writer.close()


class MLflow:
    """A run of the tracking server that MLflow is set to (`MLFLOW_TRACKING_URI`), inside the script's own if there is one."""

    def begin(self, record: RunRecord, path: Path) -> None:
        self._mlflow: Any = import_module("mlflow")
        is_inside = self._mlflow.active_run() is not None
        self._run = self._mlflow.start_run(run_name=path.name, nested=is_inside)
        self._client = self._mlflow.MlflowClient()
        for name, value in record.config.items():
            self._client.log_param(self._run.info.run_id, name, value)
        for name, value in (("flatout.path", str(path)), ("flatout.revision", record.code.revision)):
            self._client.set_tag(self._run.info.run_id, name, value)

    def values(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._client.log_metric(self._run.info.run_id, name, value, step=step)

    def end(self, record: RunRecord) -> None:
        self._mlflow.end_run("FINISHED" if record.outcome == "finished" else "FAILED")


class WeightsAndBiases:
    """A run of the project that `WANDB_PROJECT` names, in the mode that `WANDB_MODE` says; its files in the run's folder."""

    def begin(self, record: RunRecord, path: Path) -> None:
        wandb: Any = import_module("wandb")
        self._run = wandb.init(dir=str(path), name=path.name, config=dict(record.config), reinit="create_new")

    def values(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def end(self, record: RunRecord) -> None:
        self._run.finish(exit_code=0 if record.outcome == "finished" else 1)


_KNOWN: Final[dict[str, type[Any]]] = {"tensorboard": TensorBoard, "mlflow": MLflow, "wandb": WeightsAndBiases}
"""By the names of their packages."""


def resolve_sinks(wanted: Sequence[str | Sink]) -> list[Sink]:
    """Sinks by name or as they are. Raises UsageError for a name that is none, or whose package is not installed."""
    sinks: list[Sink] = []
    for one in wanted:
        if not isinstance(one, str):
            sinks.append(one)
            continue
        if one not in _KNOWN:
            raise UsageError(
                f"'{one}' is no sink; there are {', '.join(_KNOWN)}, and any object with begin, values and end"
            )
        try:
            import_module(one)
        except ImportError as e:
            raise UsageError(f"the sink '{one}' needs the package {one}, which is not installed; install it") from e
        sinks.append(_KNOWN[one]())
    return sinks


class Sinks:
    """Several sinks as one. One that fails is reported and left out from then on: a run does not end for its log."""

    def __init__(self, sinks: list[Sink]) -> None:
        self._sinks = sinks

    def each(self, what: Literal["begin", "values", "end"], *arguments: Any) -> None:
        """Call that method of each sink; see `Sink`."""
        for sink in list(self._sinks):
            try:
                getattr(sink, what)(*arguments)
            except Exception as e:  # noqa: BLE001  # somebody else's server, disk or code
                self._sinks.remove(sink)
                name = type(sink).__name__
                sys.stderr.write(f"flatout: {name} gets nothing more of this run: {type(e).__name__}: {e}\n")
