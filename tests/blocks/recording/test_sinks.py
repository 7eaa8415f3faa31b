"""Values of a run in TensorBoard, MLflow and Weights & Biases, read back by their own readers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from flatout.blocks.recording.run import Run
from flatout.core.errors import UsageError
from flatout.core.records.run import RunRecord

LOSSES = [0.5, 0.25, 0.125]
CONFIG = {"lr": 0.1, "api_key": "sk-1234567890abcdef1234567890abcdef"}


def _ran(folder: Path, *sinks: Any) -> Run:
    with Run(folder / "runs", config=CONFIG, sinks=sinks) as run:
        for loss in LOSSES:
            run.tick(loss=torch.tensor(loss), tokens=7)
    return run


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of a reader of their own
def test_tensorboard_reads_what_was_ticked(folder: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = _ran(folder, "tensorboard")
    found = EventAccumulator(str(run.path / "tensorboard"))
    found.Reload()
    assert [(e.step, e.value) for e in found.Scalars("loss")] == list(enumerate(LOSSES))
    assert [e.value for e in found.Scalars("tokens")] == [7.0] * 3
    [text] = found.Tensors("config/text_summary")
    assert b"| lr | 0.1 |" in text.tensor_proto.string_val[0]
    assert b"sk-" not in text.tensor_proto.string_val[0]


@pytest.mark.filterwarnings("ignore")
def test_mlflow_reads_what_was_ticked(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow", reason="MLflow is not installed")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri((folder / "mlruns").as_uri())
    run = _ran(folder, "mlflow")
    [found] = mlflow.search_runs(output_format="list")
    assert found.info.run_name == run.path.name
    assert found.info.status == "FINISHED"
    assert found.data.params == {"lr": "0.1"}
    history = mlflow.MlflowClient().get_metric_history(found.info.run_id, "loss")
    assert [(m.step, m.value) for m in history] == list(enumerate(LOSSES))
    assert mlflow.active_run() is None


@pytest.mark.filterwarnings("ignore")
def test_weights_and_biases_keeps_what_was_ticked(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="Weights & Biases is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    run = _ran(folder, "wandb")
    [kept] = run.path.glob("wandb/offline-run-*/run-*.wandb")
    assert kept.stat().st_size > 0
    assert b"loss" in kept.read_bytes()


class _Own:
    """Remembers what it was told, and fails if it is to."""

    def __init__(self, fails: str = "") -> None:
        self.told: list[Any] = []
        self._fails = fails

    def begin(self, record: RunRecord, path: Path) -> None:
        self._tell("begin", dict(record.config))

    def values(self, step: int, values: Mapping[str, float]) -> None:
        self._tell("values", (step, dict(values)))

    def end(self, record: RunRecord) -> None:
        self._tell("end", (record.outcome, record.num_steps))

    def _tell(self, what: str, value: Any) -> None:
        if what == self._fails:
            raise ConnectionError("the server is gone")
        self.told.append(value)


@pytest.mark.slow
def test_a_sink_of_ones_own_is_told_everything_in_order(folder: Path) -> None:
    own = _Own()
    _ran(folder, own)
    values = [(step, {"loss": loss, "tokens": 7.0}) for step, loss in enumerate(LOSSES)]
    assert own.told == [{"lr": "0.1"}, *values, ("finished", 3)]


@pytest.mark.slow
@pytest.mark.parametrize("what", ["begin", "values", "end"])
def test_a_sink_that_fails_costs_the_run_nothing(folder: Path, what: str, capsys: pytest.CaptureFixture[str]) -> None:
    bad, good = _Own(what), _Own()
    run = _ran(folder, bad, good)
    assert len(good.told) == 5
    assert len((run.path / "values.jsonl").read_text().splitlines()) == 3
    said = capsys.readouterr().err
    assert said.count("_Own gets nothing more of this run: ConnectionError: the server is gone") == 1


def test_what_is_no_sink_or_not_installed_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="'tensorbord' is no sink; there are tensorboard, mlflow, wandb"):
        Run(folder, sinks=["tensorbord"])
    monkeypatch.setitem(__import__("sys").modules, "mlflow", None)
    with pytest.raises(UsageError, match="needs the package mlflow, which is not installed"):
        Run(folder, sinks=["mlflow"])
