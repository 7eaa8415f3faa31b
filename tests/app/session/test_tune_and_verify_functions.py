"""`flatout.tune(...)` and `flatout.verify(...)`: what the verbs run, called from Python."""

from __future__ import annotations

import signal
import textwrap
import threading
from pathlib import Path

import pytest
from tests.app.session.test_tune import SLOW, quick_search
from tests.command_line import QUICK

import flatout
from flatout.app.tune_script import ScriptEnded
from flatout.core.errors import CaptureError, PlanError, UsageError
from flatout.core.records.lever import PlannedLever
from flatout.core.records.plan import Plan

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture
def folder(tmp_path: Path, cache_home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "cache").mkdir()
    for file in (cache_home / "flatout").glob("[!.]*"):  # what other tests tried lies hidden beside it
        (tmp_path / "cache" / "flatout").mkdir(exist_ok=True)
        (tmp_path / "cache" / "flatout" / file.name).write_bytes(file.read_bytes())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name, value in QUICK.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "train.py").write_text(textwrap.dedent(SLOW))
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "work"


@pytest.mark.long
def test_a_budget_that_is_too_short_still_compares_a_lever_and_leaves_the_folder_and_signals_of_this_process_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick_search(monkeypatch)
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    lines: list[str] = []

    found = flatout.tune("train.py", time_budget=1, on_progress=lines.append)

    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == before
    assert [path.name for path in folder.iterdir()] == ["train.py"]
    assert lines[0] == "observing the script"
    assert found.tuned.attempts, "what takes longest to say is tried even then"
    assert not found.tuned.is_complete
    printed = " ".join(str(found).split())
    assert "The time was up before everything had been tried; the same command goes on from here" in printed
    assert "the time was up" in printed.split("left out", 1)[1], "levers that were not reached are named"
    saved = list((folder.parent / "cache" / "flatout").glob(".train-*.search-log"))
    assert len(saved) == 1, "the same call goes on from it"


@pytest.mark.long
def test_it_works_beside_the_main_thread_where_signals_cannot_be_watched(folder: Path) -> None:
    (folder / "short.py").write_text("print('no step at all')\n")
    errors: list[CaptureError] = []

    def work() -> None:
        try:
            flatout.tune("short.py", time_budget="1s")
        except CaptureError as e:
            errors.append(e)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert "took no step of training or inference that could be timed" in str(errors[0])


@pytest.mark.long
def test_a_script_that_fails_is_an_error_with_its_last_words(folder: Path) -> None:
    (folder / "broken.py").write_text("import sys\nprint('begun')\nraise RuntimeError('disk full')\n")

    with pytest.raises(ScriptEnded, match=r"'broken.py' ended with code 1 before .*RuntimeError: disk full") as ended:
        flatout.tune("broken.py", time_budget="1s", out="plan.toml")

    assert "begun" in ended.value.output
    assert not (folder / "plan.toml").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"time_budget": "soon"}, "^time_budget soon is no time above 0"),
        ({"time_budget": -1.0}, "^time_budget -1.0 is no time above 0"),
        ({"allow": "speed"}, "^allow speed is none of exact, bounded, distribution, quality"),
        ({"memory_limit": "20"}, "^memory_limit 20 is no size above 0"),
        ({"run_steps": -1}, "^run_steps -1 must be 0 or more"),
        ({"timeout": 0.0}, "^timeout 0 must be above 0"),
        ({"out": "nowhere/plan.toml"}, "^out nowhere/plan.toml: there is no folder"),
        ({"script": "missing.py"}, "^'missing.py' is not a file"),
        ({"script": "notes.ipynb"}, "^'notes.ipynb' is a notebook.* give notes.py"),
    ],
)
def test_a_wrong_argument_of_tune_is_named_before_anything_runs(
    folder: Path, options: dict[str, object], message: str
) -> None:
    (folder / "notes.ipynb").write_text("{}")
    with pytest.raises(UsageError, match=message):
        flatout.tune(**{"script": "train.py", **options})


@pytest.mark.long
def test_a_changed_script_is_proved_and_a_different_one_is_not(folder: Path) -> None:
    text = (folder / "train.py").read_text()
    (folder / "fast.py").write_text(text.replace("torch.autograd.set_detect_anomaly(True)\n", ""))
    (folder / "other.py").write_text(text.replace("lr=1e-3", "lr=2e-3"))

    same = flatout.verify("train.py", Path("fast.py"), no_speed=True)
    other = flatout.verify("train.py", "other.py", no_speed=True)

    assert same.is_proved
    assert str(same).startswith("PROVED: equal")
    assert not other.is_proved
    assert "DIFFERENT" in other._repr_html_()


@pytest.mark.long
def test_a_plan_in_memory_is_proved_like_its_file(folder: Path) -> None:
    plan = Plan(script="train.py", lever=(PlannedLever(id="graph.debug-off", guarantee="exact"),))

    raced = flatout.verify(plan, "train.py", allow="exact", seconds=1)

    assert raced.verdict.equality.holds
    assert raced.verdict.speed is not None
    assert [path.name for path in folder.iterdir()] == ["train.py"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 0}, "^steps 0 must be at least 1"),
        ({"seconds": 0.0}, "^seconds 0 and timeout 300 must be above 0"),
        ({"at": "int8"}, "^at int8 is none of"),
        ({"before": "missing.py"}, "^'missing.py' is not a file; give two scripts"),
        ({"is_module": True, "after": "train"}, "^-m train goes with a plan"),
    ],
)
def test_a_wrong_argument_of_verify_is_named_before_anything_runs(
    folder: Path, options: dict[str, object], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        flatout.verify(**{"before": "train.py", "after": "train.py", **options})


def test_a_file_that_is_no_plan_is_named(folder: Path) -> None:
    (folder / "plan.toml").write_text("lever = 3\n")
    with pytest.raises(PlanError, match=r"plan\.toml"):
        flatout.verify("plan.toml", "train.py")
