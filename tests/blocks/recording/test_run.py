"""What a run leaves in its folder, looked at from inside one process."""

from __future__ import annotations

import json
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

from flatout.blocks.recording.replay import ReplayDifference, first_step_difference, reasons_between
from flatout.blocks.recording.run import RECORD, STEPS, Run, read_digests, read_run, runs_in, slower_than_before
from flatout.core.errors import RecordError, UsageError
from flatout.core.records.run import RunRecord, RunSpeed, StepDigests

pytestmark = pytest.mark.slow


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder outside of git, with a source, data, and a key."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.delenv("RANK", raising=False)
    (tmp_path / "here" / "part.py").write_text("x = 1\n")
    (tmp_path / "here" / "weights.bin").write_bytes(b"123")
    (tmp_path / "here" / "id_rsa").write_text("-----BEGIN OPENSSH PRIVATE KEY-----\n")
    return tmp_path / "here"


def _trained(run: Run, steps: int = 12, *, seed: int = 0) -> nn.Linear:
    torch.manual_seed(seed)
    net = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(steps):
        loss = net(torch.randn(4, 3)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.tick(loss=loss, rate=0.1)
    return net


def test_the_numbers_of_a_run_are_not_changed_and_nothing_stays_hooked(folder: Path) -> None:
    call = nn.Module.__call__
    with Run("runs", fingerprint_steps=0) as run:
        plain = _trained(run)
    with Run("runs") as run:
        watched = _trained(run)
    assert torch.equal(plain.weight, watched.weight)
    assert nn.Module.__call__ is call
    assert len(read_digests(run.path)) == 8


def test_marks_are_those_of_the_same_numbers(folder: Path) -> None:
    found = []
    for seed in (0, 0, 1):
        with Run("runs") as run:
            _trained(run, seed=seed)
        found.append(read_digests(run.path))
    assert found[0] == found[1] != found[2]
    assert first_step_difference(found[0], found[2]) == ReplayDifference(0, "inputs")
    assert set(found[0][0].weights) == {"Linear.weight", "Linear.bias"}
    assert len({digests.losses for digests in found[0]}) == 8 and all(len(digests.losses) == 1 for digests in found[0])


def test_values_and_speed_are_kept(folder: Path) -> None:
    with Run("runs") as run:
        _trained(run, 20)
    record = read_run(run.path)
    assert (record.outcome, record.num_steps) == ("finished", 20)
    assert record.speed is not None and 0 < record.speed.low_s <= record.speed.median_s <= record.speed.high_s
    values = [json.loads(line) for line in (run.path / "values.jsonl").read_text().splitlines()]
    assert [v["step"] for v in values] == list(range(20)) and all(v["rate"] == 0.1 and v["loss"] > 0 for v in values)


def test_outside_of_git_all_sources_are_kept_but_no_data_and_no_keys(folder: Path) -> None:
    with Run("runs") as run:
        pass
    record = read_run(run.path)
    assert (record.code.revision, record.code.untracked) == ("", ("part.py",))
    assert (run.path / "code" / "files" / "part.py").read_text() == "x = 1\n"
    assert not list(run.path.rglob("id_rsa")) and not list(run.path.rglob("weights.bin"))


@dataclass
class _Settings:
    lr: float = 0.5
    api_key: str = "abc"


@pytest.mark.parametrize("config", [{"lr": 0.5, "api_key": "abc"}, Namespace(lr=0.5, api_key="abc"), _Settings()])
def test_a_configuration_is_kept_without_credentials(folder: Path, config: object) -> None:
    with Run("runs", config=config) as run:
        pass
    record = read_run(run.path)
    assert record.config == {"lr": "0.5"}
    assert "config api_key" in {left.name for left in record.left_out}


def test_a_failure_is_recorded(folder: Path) -> None:
    with pytest.raises(ValueError, match="broken"), Run("runs"):
        raise ValueError("broken")
    [(_, record)] = runs_in(Path("runs"))
    assert (record.outcome, record.error) == ("failed", "ValueError: broken")


def test_a_run_inside_another_is_the_same_run(folder: Path) -> None:
    with Run("runs") as outer, Run("elsewhere") as inner:
        inner.tick()
        assert inner.path == outer.path
    assert not Path("elsewhere").exists()
    assert read_run(outer.path).num_steps == 1


def test_other_ranks_write_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    with Run("runs") as run:
        _trained(run)
    assert not Path("runs").exists()


def _record(path: Path, began: str, median_s: float | None, **other: Any) -> RunRecord:
    record = msgspec.structs.replace(
        read_run(path),
        began=began,
        speed=None
        if median_s is None
        else RunSpeed(num_steps=9, median_s=median_s, low_s=median_s * 0.98, high_s=median_s * 1.02),
        **other,
    )
    (path / RECORD).write_bytes(msgspec.json.encode(record))
    return record


def test_a_run_that_is_slower_than_its_history_says_so(folder: Path) -> None:
    paths = []
    for _ in range(4):
        with Run("runs") as run:
            pass
        paths.append(run.path)
    for number, path in enumerate(paths[:3]):
        _record(path, f"2026-01-0{number + 1}", 0.010)
    assert "1.50 times as long as in 3 run(s)" in slower_than_before(paths[3], _record(paths[3], "2026-01-09", 0.015))
    assert slower_than_before(paths[3], _record(paths[3], "2026-01-09", 0.0105)) == ""
    assert slower_than_before(paths[3], _record(paths[3], "2026-01-09", None)) == ""
    assert slower_than_before(paths[3], _record(paths[3], "2026-01-09", 0.015, command=("other.py",))) == ""


def test_a_cut_file_of_steps_ends_there_and_a_folder_without_a_run_is_an_error(folder: Path) -> None:
    with Run("runs") as run:
        _trained(run)
    data = (run.path / STEPS).read_bytes()
    (run.path / STEPS).write_bytes(data[: len(data) // 2])
    assert 0 < len(read_digests(run.path)) < 8
    (run.path / RECORD).write_bytes(b'{"version": 1, "name"')
    with pytest.raises(RecordError, match="not a RunRecord"):
        read_run(run.path)
    with pytest.raises(RecordError, match="give the folder of a run"):
        read_run(folder)
    assert runs_in(Path("runs")) == []


def test_what_is_no_configuration_or_no_folder_is_refused(folder: Path) -> None:
    with pytest.raises(UsageError, match="config is a int"), Run("runs", config=3):
        pass
    with pytest.raises(UsageError, match="cannot be made"), Run("part.py/runs"):
        pass
    with Run("runs") as run:  # the failures left nothing open
        pass
    assert read_run(run.path).outcome == "finished"


def test_differences_are_told_in_the_order_in_which_they_come_about() -> None:
    one = StepDigests(step=0, inputs=(1,), gradients={"a": 1, "b": 2}, weights={"a": 3}, losses=(4,))
    for changed, expected in (
        ({"inputs": (2,), "gradients": {}}, ReplayDifference(0, "inputs")),
        ({"losses": (5,), "weights": {}}, ReplayDifference(0, "loss")),
        ({"gradients": {"a": 1, "b": 9}}, ReplayDifference(0, "gradient", "b")),
        ({"weights": {"a": 9}}, ReplayDifference(0, "weight", "a")),
    ):
        assert first_step_difference([one], [msgspec.structs.replace(one, **changed)]) == expected  # type: ignore[arg-type]
    assert first_step_difference([one, one], [one]) == ReplayDifference(1, "end")
    assert first_step_difference([one], [one]) is None


def test_what_differs_between_two_runs_is_told_by_cause(folder: Path) -> None:
    with Run("runs", config={"lr": 1}) as run:
        pass
    one = read_run(run.path)
    assert reasons_between(one, one) == ()
    a = one.surroundings
    two = msgspec.structs.replace(
        one,
        config={"lr": "2"},
        surroundings=msgspec.structs.replace(a, num_threads=a.num_threads + 1, packages={**a.packages, "torch": "0.1"}),
    )
    assert {(r.cause, r.text.partition(":")[0]) for r in reasons_between(one, two)} == {
        ("settings", "config lr"),
        ("threads", "threads"),
        ("package", "torch"),
    }


def test_what_was_compiled_and_is_too_large_to_keep_is_named_as_left_out(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch._inductor.codecache")
    monkeypatch.setattr("torch.compiler.save_cache_artifacts", lambda: (bytes(5 << 20), None))
    with Run("runs") as kept:
        pass
    assert (kept.path / "compiled.bin").stat().st_size == 5 << 20
    monkeypatch.setattr("flatout.blocks.recording.run._MOST_COMPILED_BYTES", 1 << 20)
    with Run("runs") as left:
        pass
    assert not (left.path / "compiled.bin").exists()
    [found] = [one for one in read_run(left.path).left_out if one.name == "compiled.bin"]
    assert "it has 5 MiB" in found.because
