"""Traces that torch.profiler writes here and now: a loop on the host, and two processes on gloo."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.blocks.parallel.forked import lines_of

from flatout.app.session import diagnose_all, evidence_in

GLOO = """
    import torch.distributed as dist
    from torch import nn
    from torch.profiler import ProfilerActivity, profile, schedule

    def ranks():
        dist.init_process_group("gloo")
        rank = dist.get_rank()
        net = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 8)))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        ready = lambda p: p.export_chrome_trace(f"{sys.argv[1]}/rank{rank}.json.gz")
        plan = schedule(wait=1, warmup=1, active=3)
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True, schedule=plan, on_trace_ready=ready) as p:
            for _ in range(5):
                loss = net(torch.randn(16, 64)).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                p.step()
        dist.destroy_process_group()

    as_ranks(2, ranks)
"""


HOST = """
import sys

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, schedule

def train(path, has_annotations):
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.Adam(net.parameters())
    plan = schedule(wait=0, warmup=1, active=5, repeat=1) if has_annotations else None
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True, with_stack=True, schedule=plan) as profiler:
        for _ in range(6):
            loss = net(torch.randn(4, 8)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            profiler.step() if has_annotations else None
    profiler.export_chrome_trace(path)

for name in ("a.json", "a.json.gz"):
    train(f"{sys.argv[1]}/plain-{name}", False)
    train(f"{sys.argv[1]}/annotated-{name}", True)
"""


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Traces of a process of their own: torch's tracer of stacks may fall over threads that other tests left."""
    folder = tmp_path_factory.mktemp("traces")
    script = folder / "train.py"
    script.write_text(HOST)
    subprocess.run([sys.executable, script, folder], check=True, capture_output=True, timeout=300)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("has_annotations", [True, False])
@pytest.mark.parametrize("name", ["a.json", "a.json.gz"])
@pytest.mark.long
def test_a_loop_on_the_host_has_its_steps_phases_and_products(written: Path, name: str, has_annotations: bool) -> None:
    evidence = evidence_in([written / f"{'annotated' if has_annotations else 'plain'}-{name}"])
    assert (evidence.steps.kind, evidence.steps.num_observed) == ("training", 5)
    assert {"forward", "backward", "optimizer"} <= set(evidence.steps.phases)
    products = {o.op: o.flop for o in evidence.operators if o.phase == "forward" and o.flop}
    assert products["aten.linear"] in (2 * 4 * 8 * 16, 2 * 4 * 16)
    assert any(s.function == "train" for s in evidence.sources)
    diagnose_all(evidence)


@pytest.mark.multi
@pytest.mark.slow
@pytest.mark.long
def test_two_processes_show_their_collectives(tmp_path: Path) -> None:
    lines_of(GLOO, tmp_path)
    found = evidence_in([tmp_path]).distributed
    assert found is not None
    assert (found.backend, found.world_size, [r.rank for r in found.ranks]) == ("gloo", 2, [0, 1])
    [collective] = found.collectives
    assert (collective.op, collective.bytes) == ("all_reduce", 4 * (64 * 128 + 128 + 128 * 8 + 8))
    assert 0 <= collective.exposed_s <= collective.seconds
