"""Ranks on several hosts: two launchers on this machine, with folders of their own for what is temporary, stand for two hosts."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from flatout.app.cli.ranks import FolderExchange, Rank, exchange_of, launched_rank
from flatout.core.errors import UsageError
from flatout.report.json_report import read_evidence

TRAIN = """
import gc
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
model = DistributedDataParallel(nn.Linear(64, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(4000):
    model(torch.randn(16, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
del model, optimizer  # torch 2.13 aborts now and then where a thread of gloo still holds Python objects at the end
gc.collect()
dist.destroy_process_group()
"""


def checked(folder: Path, launcher: str, *options: str) -> list[tuple[int, str]]:
    """Code and output of each host's launcher."""
    (folder / "train.py").write_text(TRAIN)
    with socket.create_server(("127.0.0.1", 0)) as one:
        port = one.getsockname()[1]
    processes = []
    for host in range(2):
        temporary = folder / f"host{host}"
        temporary.mkdir()
        words = [sys.executable, "-m", launcher, "--nnodes", "2", "--nproc-per-node", "2", "--rdzv-backend", "c10d"]
        words += ["--rdzv-endpoint", f"localhost:{port}", "--rdzv-id", "hosts", "--local-addr", "localhost"]
        words += ["-m", "flatout.app.cli", "check", "--no-trials", "--seconds", "2", *options]
        words += ["--json", str(temporary / "report.json"), "train.py"]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": str(temporary), "COLUMNS": "160"}
        with (temporary / "output").open("wb") as output:
            processes.append(
                subprocess.Popen(
                    words, cwd=folder, env=environment, stdout=output, stderr=output, stdin=subprocess.DEVNULL
                )
            )
    return [(one.wait(200), (folder / f"host{host}" / "output").read_text()) for host, one in enumerate(processes)]


@pytest.mark.slow
@pytest.mark.multi
@pytest.mark.long
@pytest.mark.parametrize(
    ("launcher", "gathers"), [("torch.distributed.run", False), ("flatout.blocks.elastic.torchrun", True)]
)
def test_rank_0_reports_the_ranks_of_all_hosts(tmp_path: Path, launcher: str, gathers: bool) -> None:
    options = ("--gather", str(tmp_path / "seen-by-all")) if gathers else ()
    ended = checked(tmp_path, launcher, *options)
    assert [code for code, _ in ended] == [0, 0], ended
    text = "".join(text for _, text in ended)
    assert text.count("a training step") == 1 and "4 ranks, gloo" in text
    found = [
        host / "report.json" for host in (tmp_path / "host0", tmp_path / "host1") if (host / "report.json").exists()
    ]
    assert len(found) == 1
    distributed = read_evidence(found[0].read_bytes()).distributed
    assert distributed is not None and [one.rank for one in distributed.ranks] == [0, 1, 2, 3]
    assert all(one.step_numbers for one in distributed.ranks)
    assert not list(tmp_path.glob("host*/flatout-*")) and not list(tmp_path.glob("host*/report.rank*"))
    if gathers:
        assert list((tmp_path / "seen-by-all").iterdir()) == []


SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "2",
    "SLURM_NTASKS": "5",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
}


def test_a_task_of_srun_is_a_rank_unless_a_launcher_says_otherwise() -> None:
    assert launched_rank(SLURM) == Rank(2, 5, 2)
    assert launched_rank(SLURM | {"SLURM_NODEID": "2", "SLURM_PROCID": "4"}) == Rank(4, 5, 1)
    assert launched_rank(SLURM | {"RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}) == Rank(1, 8, 4)
    assert launched_rank(SLURM | {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}) is None
    batch = {name: value for name, value in SLURM.items() if name != "SLURM_STEP_ID"}
    assert launched_rank(batch) is None, "a batch script is no task"


def test_without_another_host_or_a_way_nothing_is_exchanged(tmp_path: Path) -> None:
    assert exchange_of(SLURM, Rank(0, 4, 4), tmp_path) is None
    assert exchange_of(SLURM, Rank(0, 4, 2), None) is None
    assert exchange_of(SLURM, Rank(0, 4, 2), tmp_path / "none") is None
    assert isinstance(exchange_of(SLURM | {"SLURM_SUBMIT_DIR": str(tmp_path)}, Rank(0, 4, 2), None), FolderExchange)


def test_a_folder_takes_what_one_rank_leaves_and_another_fetches(tmp_path: Path) -> None:
    exchange = FolderExchange(tmp_path / "both")
    assert exchange.take(3) is None
    exchange.put(3, b"seen")
    assert exchange.take(3) == b"seen" and (tmp_path / "both").stat().st_mode & 0o077 == 0
    exchange.close()
    assert exchange.take(3) is None and not (tmp_path / "both").exists()
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(UsageError, match="not a folder of yours alone"):
        FolderExchange(tmp_path / "link").put(0, b"")
