"""Notices to end: all ranks save after the same step, and the next start goes on from there."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from flatout.app.cli.job import job
from flatout.blocks.elastic.alive import Life
from flatout.blocks.elastic.preemption import EXIT_CODE, Preempted, PreemptionNotice, catches
from flatout.blocks.elastic.survivor import Survivor
from flatout.core.errors import UsageError

TRAIN = """
import os, signal, sys, time
import flatout, torch
from torch import nn
folder, how, steps = sys.argv[1], sys.argv[2], 150
with flatout.World() as world:
    torch.manual_seed(0)
    model = world.place(nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    torch.manual_seed(world.rank)
    with flatout.Survivor(f"{folder}/disk", disk_every=10_000) as state:
        done = state.resume(model=model, optimizer=optimizer)
        log = open(f"{folder}/log-{world.rank}", "a", buffering=1)
        log.write(f"from {done}\\n")
        while done < steps:
            loss = model(torch.randn(2, 4)).square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            done += 1
            log.write(f"{done} {loss.item().hex()}\\n")
            if how == "signal" and done == 20 and world.rank == world.num_ranks - 1:
                os.kill(os.getpid(), signal.SIGUSR1)
            if how == "asked" and done == 20 and world.rank == 0:
                state.ask_to_end()
            if how == "slow":
                time.sleep(0.05)
            state.keep(done, model=model, optimizer=optimizer)
"""
OURS, TORCH = "flatout.blocks.elastic.torchrun", "torch.distributed.run"


def started(module: str, folder: Path, how: str, *options: str) -> subprocess.Popen[str]:
    (folder / "train.py").write_text(TRAIN)
    words = [sys.executable, "-m", module]
    if module == "flatout.app.cli":
        words += ["survive", "--nproc", "3", str(folder / "train.py"), "--"]
    else:
        words += [
            "--standalone",
            "--nproc-per-node",
            "3",
            "--monitor-interval",
            "0.1",
            *options,
            str(folder / "train.py"),
        ]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [*words, str(folder), how], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def logs(folder: Path) -> list[list[str]]:
    return [(folder / f"log-{rank}").read_text().splitlines() for rank in range(3)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    folder = tmp_path_factory.mktemp("whole")
    ended = started(OURS, folder, "never")
    assert ended.communicate(timeout=200)[1] is not None and ended.returncode == 0
    return logs(folder)


@pytest.mark.slow
@pytest.mark.multi
@pytest.mark.parametrize(
    ("module", "how", "code"),
    [
        (OURS, "signal", EXIT_CODE),
        (OURS, "asked", EXIT_CODE),
        (TORCH, "signal", 1),
        ("flatout.app.cli", "signal", EXIT_CODE),
    ],
)
def test_one_rank_that_is_asked_has_all_save_after_the_same_step(
    tmp_path: Path, whole: list[list[str]], module: str, how: str, code: int
) -> None:
    first = started(module, tmp_path, how)
    wrong = first.communicate(timeout=200)[1]
    assert first.returncode == code, wrong[-2000:]
    step = int(re.findall(r"asked to end: the state after step (\d+) is in memory and", wrong)[0])
    assert 20 < step < 150
    assert [path.name for path in (tmp_path / "disk").iterdir() if path.name.startswith("step")] == [f"step-{step}"]
    second = started(module, tmp_path, "never")
    assert second.communicate(timeout=200)[1] is not None and second.returncode == 0
    expected = [[*log[: step + 1], f"from {step}", *log[step + 1 :]] for log in whole]
    assert logs(tmp_path) == expected, "bit for bit, and no step twice"


@pytest.mark.slow
@pytest.mark.multi
@pytest.mark.parametrize("options", [(), ("--agent-restarts", "3", "--max-restarts", "3")])
def test_a_launcher_that_is_told_to_end_hands_it_on(
    tmp_path: Path, whole: list[list[str]], options: tuple[str, ...]
) -> None:
    first = started(OURS, tmp_path, "slow", *options)
    deadline = time.monotonic() + 60
    while not (tmp_path / "log-2").exists() or len((tmp_path / "log-2").read_text().splitlines()) < 10:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    first.send_signal(signal.SIGTERM)
    wrong = first.communicate(timeout=100)[1]
    assert first.returncode == EXIT_CODE, wrong[-2000:]
    second = started(OURS, tmp_path, "never")
    assert second.communicate(timeout=200)[1] is not None and second.returncode == 0
    assert [[line for line in log if "from" not in line] for log in logs(tmp_path)] == [log[1:] for log in whole]


# -- one process -------------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def nobody_handles_them() -> Iterator[None]:
    """Signals as a program of its own has them: a test before may have left a handler."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGUSR1, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def notice(nobody_handles_them: None) -> Iterator[PreemptionNotice]:
    found = PreemptionNotice((signal.SIGUSR1,), timedelta(seconds=10))
    yield found
    found.close()


def test_a_signal_is_noted_and_handled_as_before_afterwards(notice: PreemptionNotice) -> None:
    assert catches(os.getpid(), signal.SIGUSR1) and not notice.is_due()
    signal.raise_signal(signal.SIGUSR1)
    assert notice.is_due()
    notice.close()
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL and not catches(os.getpid(), signal.SIGUSR1)


def test_two_trainings_of_a_process_are_both_told(notice: PreemptionNotice) -> None:
    second = PreemptionNotice((signal.SIGUSR1,), timedelta(seconds=10))
    signal.raise_signal(signal.SIGUSR1)
    assert notice.is_due() and second.is_due()
    second.close()
    third = PreemptionNotice((signal.SIGUSR1,), timedelta(seconds=10))
    signal.raise_signal(signal.SIGUSR1)
    assert third.is_due()
    third.close()


def test_a_handler_of_the_programs_own_stays() -> None:
    got = []
    signal.signal(signal.SIGUSR1, lambda *_: got.append(1))
    try:
        notice = PreemptionNotice((signal.SIGUSR1,), timedelta(seconds=10))
        signal.raise_signal(signal.SIGUSR1)
        assert got == [1] and not notice.is_due()
        notice.close()
        assert signal.getsignal(signal.SIGUSR1) is not signal.SIG_DFL
    finally:
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)


@pytest.mark.parametrize("ends", [True, False])
def test_a_training_of_one_process_ends_with_its_state_on_the_disk(tmp_path: Path, ends: bool) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(Preempted) as caught, Survivor(tmp_path, disk_every=1000) as state:
        for step in range(1, 4):
            nn.init.constant_(model.weight, step)
            if step == 3:
                state.ask_to_end() if ends else signal.raise_signal(signal.SIGTERM)
            state.keep(step, model=model)
    assert (caught.value.code, caught.value.step) == (EXIT_CODE, 3)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    nn.init.zeros_(model.weight)
    with Survivor(tmp_path) as state:
        assert state.resume(model=model) == 3
    assert torch.equal(model.weight, torch.full((2, 2), 3.0))


def test_a_state_that_has_no_place_ends_no_training_as_if_it_were_saved() -> None:
    with Survivor(None) as state:
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        with pytest.raises(UsageError, match="no place for the state"):
            state.ask_to_end()


def test_signals_are_left_alone_where_none_is_wanted(tmp_path: Path) -> None:
    with Survivor(tmp_path, preemption=()):
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL


# -- the health probe --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("life", "is_alive"),
    [
        (Life(None, 10), True),
        (Life(None, 100), False),
        (Life(5, 100), True),
        (Life(50, 100), False),
        (Life(50, 10), True),
    ],
)
def test_a_training_is_alive_that_makes_steps_or_may_still_begin(life: Life, is_alive: bool) -> None:
    assert life.is_alive(within_s=20, start_s=60) is is_alive


def test_the_probe_finds_the_last_step_of_this_users_trainings(tmp_path: Path) -> None:
    words = ["alive", "--within", "60", "--start", "0", "--memory-folder", str(tmp_path)]
    assert CliRunner().invoke(job, words).exit_code == 1
    folder = tmp_path / "flatout-job-x"
    folder.mkdir()
    found = CliRunner().invoke(job, words)
    assert found.exit_code == 0 and found.output.startswith("alive: the last step 0 s ago")
    os.utime(folder, (1e9, 1e9))
    assert CliRunner().invoke(job, words).exit_code == 1


STORM = """
import os, signal, subprocess, sys
from datetime import timedelta
from time import monotonic
from flatout.blocks.elastic.preemption import PreemptionNotice
notice = PreemptionNotice((signal.SIGUSR1,), timedelta(seconds=10))
storm = f"import os, signal\\nfor _ in range(400_000): os.kill({os.getpid()}, signal.SIGUSR1)"
process = subprocess.Popen([sys.executable, "-c", storm])
end = monotonic() + 3
while monotonic() < end:
    notice.is_due()
process.wait()
print("due", notice.is_due())
"""


@pytest.mark.slow
def test_a_notice_that_comes_while_another_is_noted_hangs_nothing() -> None:
    """Slurm and the agent both send SIGTERM, in the same millisecond: a lock taken by the handler would wait for itself."""
    done = subprocess.run([sys.executable, "-c", STORM], capture_output=True, text=True, check=True, timeout=40)

    assert done.stdout == "due True\n"
