"""`flatout check` on scripts of several processes, on gloo: as a user meets it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import NamedTuple

import pytest
from tests.blocks.parallel.forked import lines_of
from tests.command_line import QUICK

from flatout.check.rules.communication import sync_while_accumulating, uneven_batches
from flatout.core.records.distributed import Distributed
from flatout.core.records.evidence import Evidence
from flatout.report.json_report import read_evidence

pytestmark = [pytest.mark.multi, pytest.mark.slow]

START = """
    import hashlib
    import sys
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
"""
ACCUMULATING = """
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 8)))
    optimizer = torch.optim.Adam(model.parameters())
    torch.manual_seed(rank)
    for step in range(30):
        for micro in range(3):
            loss = model(torch.randn(16, 64)).square().mean()
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        logged = loss.detach().clone()
        dist.all_reduce(logged)
    weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    print(f"hash of rank {rank}: {hashlib.sha256(weights).hexdigest()}, next {torch.rand(1).item()}", flush=True)
    dist.destroy_process_group()
"""
UNEVEN = """
    class Reader(nn.Module):
        def __init__(self):
            super().__init__()
            self.words = nn.Embedding(100, 64)
            self.layer = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
        def forward(self, tokens):
            return self.layer(self.words(tokens)).mean()
    model = DistributedDataParallel(Reader())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(36):
        length = 512 if step % 2 == rank else 16
        loss = model(torch.randint(100, (8, length)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()
"""
SHARDED = """
    from torch.distributed.fsdp import fully_shard
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
    for layer in (model[0], model[2], model):
        fully_shard(layer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    torch.manual_seed(rank)
    for step in range(24):
        model(torch.randn(8, 16)).square().mean().backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    weights = b"".join(p.to_local().detach().numpy().tobytes() for p in model.parameters())
    print(f"hash of rank {rank}: {hashlib.sha256(weights).hexdigest()}, next {torch.rand(1).item()}", flush=True)
    dist.destroy_process_group()
"""
UNWELL = """
    model = DistributedDataParallel(nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(40):
        if step == 25 and rank == 2:
            raise ValueError("rank two is unwell")
        model(torch.randn(4, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


class Ran(NamedTuple):
    code: int
    out: str
    err: str
    evidence: Evidence

    @property
    def distributed(self) -> Distributed:
        assert self.evidence.distributed is not None
        return self.evidence.distributed


@pytest.fixture(scope="module")
def environment(cache_home: Path) -> dict[str, str]:
    return {**os.environ, **QUICK, "XDG_CACHE_HOME": str(cache_home), "COLUMNS": "100"}


def run(command: list[str], folder: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )


def hashes_alone(folder: Path) -> list[str]:
    """What two ranks of the same script tell without flatout."""
    told = lines_of("import runpy; as_ranks(2, lambda: runpy.run_path(sys.argv[1]))", folder / "train.py")
    hashes = re.findall(r"hash of rank \d: \w{64}, next [\d.]+", "\n".join(told))
    assert len(hashes) == 2, told
    return hashes


def check(
    script: str,
    folder: Path,
    environment: dict[str, str],
    *,
    nproc: int,
    launcher: bool = False,
    options: tuple[str, ...] = (),
) -> Ran:
    """Check a script as `nproc` ranks, started by flatout or by torchrun."""
    (folder / "train.py").write_text(textwrap.dedent(START) + textwrap.dedent(script))
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(nproc), "-m"]
    command = [
        "flatout.app.cli",
        "check",
        *([] if launcher else ["--nproc", str(nproc)]),
        "--json",
        "report.json",
        *options,
        "train.py",
    ]
    done = run([*(torchrun if launcher else []), *command], folder, environment)
    report = folder / "report.json"
    assert report.exists(), done.stderr
    return Ran(done.returncode, done.stdout, done.stderr, read_evidence(report.read_bytes()))


@pytest.mark.long
def test_two_ranks_are_one_report_and_compute_what_they_compute_alone(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    ran = check(ACCUMULATING, tmp_path, environment, nproc=2)

    assert ran.code == 0, ran.err
    assert all(line in ran.out for line in hashes_alone(tmp_path))
    assert ran.out.count("a training step") == 1
    assert "2 ranks, gloo" in ran.out
    assert ran.evidence.workload.world_size == 2
    assert [r.rank for r in ran.distributed.ranks] == [0, 1]
    assert ran.distributed.missing_ranks == ()
    assert set(ran.distributed.ranks[0].step_numbers) & set(ran.distributed.ranks[1].step_numbers)
    assert set(ran.distributed.ranks[1].batch_elements) == {3 * 16 * 64}

    texts = {
        c.op: (s.text, round(c.num)) for c in ran.distributed.collectives if (s := ran.evidence.source_of(c.source))
    }
    assert texts == {"ddp.gradients": ("loss.backward()", 3), "all_reduce": ("dist.all_reduce(logged)", 1)}
    [module] = ran.distributed.replications
    assert round(module.syncs_per_step) == 3
    assert sum(module.bucket_bytes) == 4 * (64 * 128 + 128 + 128 * 8 + 8)
    [finding] = sync_while_accumulating.RULE.check(ran.evidence)
    assert finding.where is not None
    assert finding.where.text == "loss.backward()"


@pytest.mark.long
def test_sharded_parameters_are_watched_and_not_disturbed(tmp_path: Path, environment: dict[str, str]) -> None:
    ran = check(SHARDED, tmp_path, environment, nproc=2)

    assert ran.code == 0, ran.err
    assert all(line in ran.out for line in hashes_alone(tmp_path))
    assert ran.evidence.observing.num_deep_steps == 3
    ops = {c.op for c in ran.distributed.collectives}
    assert any(op.startswith("all_gather") for op in ops)
    assert any(op.startswith("reduce_scatter") for op in ops)


@pytest.mark.long
def test_longer_sequences_on_one_rank_are_found_under_torchrun(tmp_path: Path, environment: dict[str, str]) -> None:
    ran = check(UNEVEN, tmp_path, environment, nproc=2, launcher=True, options=("--no-trials",))

    assert ran.code == 0, ran.err
    assert ran.out.count("a training step") == 1
    assert set(ran.distributed.ranks[0].batch_elements) == {8 * 16, 8 * 512}
    assert len(list(uneven_batches.RULE.check(ran.evidence))) == 1


@pytest.mark.long
def test_a_rank_that_fails_is_reported_by_the_others(tmp_path: Path, environment: dict[str, str]) -> None:
    ran = check(UNWELL, tmp_path, environment, nproc=3, options=("--no-trials",))

    assert ran.code == 1
    assert ran.evidence.workload.world_size == 3
    assert "ValueError: rank two is unwell" in ran.err
    assert any("rank 2 ended with code 1: ValueError: rank two is unwell" in n for n in ran.evidence.notes)
    assert ran.evidence.steps.num_observed >= 20
