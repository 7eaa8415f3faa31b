from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from tests.command_line import flatout

from flatout.core.records.scale import MeasuredStep
from flatout.scale.inputs import read_runs

pytestmark = pytest.mark.slow

TINY = "hidden = 32\nlayers = 2\nheads = 4\nvocab = 64\nseq = 16\n"


@pytest.mark.multi
@pytest.mark.long
def test_steps_of_every_kind_are_measured_and_can_be_read(tmp_path: Path) -> None:
    (tmp_path / "tiny.toml").write_text(TINY)
    given = ["--model", "tiny.toml", "--out", "runs.json", "--nproc", 2, "--seconds", 6, "--device", "cpu"]
    ended = flatout("calibrate", *given, folder=tmp_path)
    assert ended.code == 0, ended.err
    steps = msgspec.json.decode((tmp_path / "runs.json").read_bytes(), type=list[MeasuredStep])
    runs = read_runs(tmp_path / "runs.json")
    assert f"{len(runs)} steps measured on 2 x cpu" in ended.out
    assert {(s.layout.tensor, s.layout.pipeline, s.layout.data) for s in steps} == {(1, 1, 2), (1, 2, 1), (2, 1, 1)}
    assert all(s.seconds is not None and s.seconds > 0 and s.peak_bytes is None for s in steps)


@pytest.mark.parametrize(
    "options,part",
    [
        (["--out", "no/runs.json"], "there is no folder"),
        (["--out", "runs.json", "--nproc", "0"], "give one rank or more"),
        (["--out", "runs.json", "--seconds", "0"], "seconds above 0"),
    ],
)
def test_what_cannot_be_measured_is_told(options: list[str], part: str, tmp_path: Path) -> None:
    (tmp_path / "tiny.toml").write_text(TINY)
    ended = flatout("calibrate", "--model", "tiny.toml", *options, folder=tmp_path)
    assert ended.code == 2
    assert part in " ".join(ended.err.split())


@pytest.mark.long
def test_a_dash_prints_the_steps_alone(tmp_path: Path) -> None:
    (tmp_path / "tiny.toml").write_text(TINY)
    words = ["--model", "tiny.toml", "--out", "-", "--nproc", 1, "--seconds", 0.1, "--device", "cpu"]
    ended = flatout("calibrate", *words, folder=tmp_path)
    assert ended.code == 0, ended.err
    assert len(msgspec.json.decode(ended.out, type=list[MeasuredStep])) >= 1
    assert "steps measured on 1 x cpu" in ended.err
    assert [file.name for file in tmp_path.iterdir()] == ["tiny.toml"]
