from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.app.fleet.conftest import TRAIN, hooked
from tests.command_line import flatout

from flatout.app.fleet import installing
from flatout.blocks.recording.job_store.opening import open_store


def run_with_site(folder: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """A training in a Python whose site-packages include a folder."""
    start = (
        f"import site, sys; site.addsitedir({str(folder)!r}); sys.argv = ['train.py']; exec(open('train.py').read())"
    )
    (folder / "train.py").write_text(TRAIN)
    return subprocess.run(
        [sys.executable, "-c", start],
        cwd=folder,
        env={k: v for k, v in environment.items() if k != "PYTHONPATH"},
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
    )


@pytest.mark.slow
def test_the_hook_of_an_environment_watches_where_the_variable_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(installing.sysconfig, "get_path", lambda name: str(tmp_path))
    assert flatout("fleet", "hook").out == f"written to {tmp_path / 'flatout_watch.pth'}\n"
    store = tmp_path / "store.sqlite"

    run_with_site(tmp_path, hooked(store) | {"FLATOUT_WATCH": "0"})
    assert not store.exists()
    done = run_with_site(tmp_path, hooked(store))
    assert done.stderr == ""
    assert len(open_store(store).read().jobs) == 1

    assert flatout("fleet", "hook", "--remove").code == 0
    assert not (tmp_path / "flatout_watch.pth").exists()
    assert flatout("fleet", "hook", "--remove").code == 0


def test_the_prolog_prints_what_slurm_sets_and_adds_to_pythonpath(tmp_path: Path) -> None:
    path = tmp_path / "prolog.sh"
    assert flatout("fleet", "prolog", "--store", tmp_path / "the store", "--out", path).code == 0

    lines = subprocess.run([path], env={"PYTHONPATH": "/mine"}, capture_output=True, text=True, check=True).stdout
    off = subprocess.run([path], env={"FLATOUT_WATCH": "0"}, capture_output=True, text=True, check=True).stdout

    assert lines.splitlines() == [
        f"export FLATOUT_STORE={tmp_path / 'the store'}",
        "export FLATOUT_WATCH=1",
        f"export PYTHONPATH={installing.STARTUP}:/mine",
    ]
    assert off == ""


@pytest.mark.slow
def test_a_command_and_a_script_are_watched_without_a_hook(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    store = tmp_path / "fleet"
    environment = {k: v for k, v in hooked(store).items() if not k.startswith(("FLATOUT", "PYTHONPATH"))}
    watch = [sys.executable, "-m", "flatout.app.cli", "watch", "--store", store]
    outputs = []
    for arguments in (["--command", sys.executable, "train.py", "40"], ["train.py", "40"]):
        done = subprocess.run(
            [*watch, *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True, timeout=100
        )
        outputs.append(done.stdout)

    assert len(set(outputs)) == 1
    jobs = open_store(store).read().jobs
    assert [(job.command, job.outcome) for job in jobs] == [("train.py 40", "finished")] * 2
    assert len(list((tmp_path / "runs").iterdir())) == 1  # the command leaves no folder


@pytest.mark.slow
def test_a_watched_script_that_fails_is_a_failed_job_and_its_cost_is_printed(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(f"{TRAIN}\nraise ValueError('bad batch')\n")
    done = subprocess.run(
        [sys.executable, "-m", "flatout.app.cli", "watch", "--store", tmp_path / "fleet", "train.py"],
        cwd=tmp_path,
        env={k: v for k, v in hooked(tmp_path).items() if not k.startswith(("FLATOUT", "PYTHONPATH"))},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )

    assert done.returncode == 1
    assert "flatout: watching took" in done.stderr
    (job,) = open_store(tmp_path / "fleet").read().jobs
    assert (job.outcome, job.error) == ("failed", "ValueError: bad batch")


def test_a_command_that_is_not_there_is_refused(tmp_path: Path) -> None:
    ended = flatout("watch", "--store", tmp_path / "f", "--command", "no-such-command", "x", folder=tmp_path)

    assert ended.code == 2
    assert "there is no command 'no-such-command'" in ended.err
    assert "--command needs a command" in flatout("watch", "--command", folder=tmp_path).err
