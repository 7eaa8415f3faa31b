from __future__ import annotations

from pathlib import Path

import pytest
from tests.check.traces.kineto_builder import training
from typer.testing import CliRunner

from flatout.app.cli.app import app
from flatout.report.json_report import read_evidence

pytestmark = pytest.mark.slow

RUN = CliRunner()


def test_a_trace_is_diagnosed_and_written_as_a_report(tmp_path: Path) -> None:
    trace = training(steps=4).write(tmp_path / "trace.json.gz")
    report = tmp_path / "report.json"
    done = RUN.invoke(app, ["report", str(trace), "--json", str(report)])
    assert done.exit_code == 0, done.output
    assert "a training step" in done.output
    assert read_evidence(report.read_bytes()).device_step is not None
    again = RUN.invoke(app, ["report", str(report)])
    assert again.exit_code == 0
    assert "a training step" in again.output


def test_a_folder_of_ranks_is_one_report(tmp_path: Path) -> None:
    for rank in range(2):
        training(rank=rank, world_size=2).write(tmp_path / f"rank{rank}.json")
    done = RUN.invoke(app, ["report", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert "2 ranks" in done.output
