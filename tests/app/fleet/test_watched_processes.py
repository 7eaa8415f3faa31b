"""Unchanged scripts in processes of their own, watched by the start-up hook."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from time import monotonic, sleep

import pytest
from tests.app.fleet.conftest import TRAIN, Watched, hooked

from flatout.app.fleet.installing import STARTUP
from flatout.blocks.recording.job_store.opening import open_store

pytestmark = pytest.mark.slow


def test_a_watched_training_comes_out_the_same_to_the_last_bit_and_leaves_a_row(watched: Watched) -> None:
    plain = watched(environment={"FLATOUT_WATCH": "0"})
    found = watched(TRAIN, "40")

    assert (plain.code, plain.jobs) == (0, ())
    assert (found.code, found.err) == (0, "")
    assert found.out == plain.out
    (job,) = found.jobs
    assert (job.name, job.command, job.outcome, job.error) == ("train.py", "train.py 40", "finished", "")
    assert (job.num_steps, job.world_size, job.device, job.num_gpus) == (40, 1, "cpu", 0)
    assert job.num_parameters == 16 * 32 + 32 + 32 + 1
    assert job.step_s is not None
    assert job.low_s is not None
    assert 0 < job.low_s <= job.step_s < 1
    assert job.not_looked.startswith("a look takes about")
    assert job.start_s < job.seconds
    assert 0 < job.observing_s < job.seconds


@pytest.mark.parametrize(
    ("end", "code", "outcome", "error"),
    [
        ("raise ValueError('bad batch')", 1, "failed", "ValueError: bad batch"),
        ("raise KeyboardInterrupt", -2, "ended", "KeyboardInterrupt"),
        ("sys.exit(0)", 0, "finished", ""),
    ],
)
def test_the_row_says_how_a_job_ended(watched: Watched, end: str, code: int, outcome: str, error: str) -> None:
    found = watched(f"{TRAIN}\n{end}\n")

    assert found.code == code
    assert [(job.outcome, job.error) for job in found.jobs] == [(outcome, error)]


def test_a_process_that_trains_nothing_leaves_no_row_and_imports_nothing_of_torch(watched: Watched) -> None:
    found = watched(
        "import sys\nprint(sorted({m.partition('.')[0] for m in sys.modules} & {'torch', 'msgspec', 'sqlite3'}))"
    )

    assert (found.out, found.jobs) == ("[]\n", ())
    assert watched("import torch\nprint(torch.ones(1).item())").jobs == ()
    assert watched(TRAIN, "5").jobs == ()  # a library's test, or a try in a notebook


def test_a_killed_job_leaves_what_its_last_heartbeat_wrote(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "fleet").mkdir()
    (tmp_path / "fleet" / "fleet.toml").write_text("[watch]\nheartbeat_s = 1\nlooks = false\n")
    store = open_store(tmp_path / "fleet")
    process = subprocess.Popen([sys.executable, "train.py", "100000000"], cwd=tmp_path, env=hooked(tmp_path / "fleet"))
    try:
        end_s = monotonic() + 60
        while not any(job.revision >= 2 for job in store.read().jobs):
            assert monotonic() < end_s
            sleep(0.1)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()

    (job,) = store.read().jobs
    assert job.outcome == "running"
    assert job.num_steps > 100


def test_workers_of_a_loader_leave_no_rows(watched: Watched) -> None:
    found = watched("""
        import torch
        from torch.utils.data import DataLoader, TensorDataset
        net = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        data = DataLoader(TensorDataset(torch.randn(120, 4)), batch_size=4, num_workers=2)
        for (x,) in data:
            net(x).sum().backward()
            optimizer.step()
        """)

    assert found.code == 0, found.err
    assert [(job.num_steps, job.outcome) for job in found.jobs] == [(30, "finished")]


@pytest.mark.multi
def test_of_the_ranks_of_a_node_the_first_leaves_the_row(watched: Watched) -> None:
    found = watched(
        """
        import gc, torch, torch.distributed as dist
        dist.init_process_group("gloo")
        net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(30):
            net(torch.randn(8, 4)).sum().backward()
            optimizer.step()
        # torch 2.13: a thread of gloo that still holds Python objects when the interpreter ends aborts the process
        del net, optimizer
        gc.collect()
        dist.destroy_process_group()
        """,
        command=(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
    )

    assert found.code == 0, found.err
    (job,) = found.jobs
    assert (job.rank, job.world_size, job.local_world_size, job.num_steps) == (0, 2, 2, 30)
    assert job.job != job.id  # it is the same when torchrun starts its ranks again


@pytest.mark.long
def test_a_look_names_the_line_of_a_planted_cause(watched: Watched) -> None:
    found = watched(
        """
        import torch, time
        from torch import nn
        net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 1))
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
        end = time.monotonic() + 14
        while time.monotonic() < end:
            table = torch.tensor([[float(i * j) for i in range(64)] for j in range(64)])  # planted
            loss = net(table).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        """,
        policy="[watch]\ncost_fraction = 0.5\nheartbeat_s = 1\n",
    )

    assert (found.code, found.err) == (0, "")
    (job,) = found.jobs
    assert job.not_looked == ""
    assert (job.findings[0].file, job.findings[0].line) == ("train.py", 8)
    assert job.saved_fraction is not None
    assert job.saved_fraction > 0.2
    assert job.flop_per_step
    assert job.model == "Sequential"
    assert sum(job.phases.values()) == pytest.approx(1.0, abs=0.1)


def test_the_policy_of_the_store_is_followed(watched: Watched) -> None:
    found = watched(
        TRAIN,
        "40",
        "--api-key",
        "abcdef",
        policy=("[redact]\narguments = true\nusers = true\n[watch]\nlooks = false\n[teams]\nvision = ['ada']\n"),
        environment={"LOGNAME": "ada"},
    )

    (job,) = found.jobs
    assert (job.command, job.user, job.team) == ("train.py <left out>", "", "vision")
    assert "abcdef" not in repr(job)
    assert job.not_looked == "the policy wants no looks"


def test_secrets_in_arguments_are_left_out_without_any_policy(watched: Watched) -> None:
    (job,) = watched(TRAIN, "40", "--api-key", "abcdef").jobs

    assert job.command == "train.py 40 --api-key <left out>"


def test_a_job_whose_store_cannot_be_written_trains_all_the_same(watched: Watched, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    plain = watched(environment={"FLATOUT_WATCH": "0"})

    found = watched(environment={"FLATOUT_STORE": str(tmp_path / "file")})

    assert (found.code, found.out) == (0, plain.out)
    assert found.err.startswith("flatout: this job is not watched: the store")
    wrong = watched(policy="[watch]\ncost_fraction = 7\n")
    assert (wrong.code, wrong.out) == (0, plain.out)
    assert "cost_fraction = 7.0 must be above 0" in wrong.err


def test_another_sitecustomize_runs_as_before(watched: Watched, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "sitecustomize.py").write_text("import sys\nsys.from_other = __name__\n")

    found = watched(f"{TRAIN}\nprint(sys.from_other)\n", environment={"PYTHONPATH": f"{STARTUP}{os.pathsep}{other}"})

    assert found.out.endswith("sitecustomize\n")
    assert len(found.jobs) == 1


def test_jobs_of_one_machine_go_into_an_sqlite_file(watched: Watched) -> None:
    found = watched(store="jobs.sqlite")

    assert found.code == 0, found.err
    assert [job.outcome for job in found.jobs] == ["finished"]
