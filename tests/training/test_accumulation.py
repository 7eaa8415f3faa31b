"""Two ranks accumulate: one exchange a step, the same weights."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

SCRIPT = """
    import json, os, sys
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel
    from flatout.parallel.world import World
    from flatout.training.accumulation import accumulating

    def trained(kind, is_wise):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
        count = [0]
        if kind == "ddp":
            model = DistributedDataParallel(net)
            def counting(group, bucket):
                count[0] += 1
                return allreduce_hook(group, bucket)
            model.register_comm_hook(None, counting)
        else:
            model = fully_shard(net, mesh=world.mesh())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        torch.manual_seed(world.rank)
        for step in range(4):
            for micro in range(3):
                with accumulating(model, is_last=micro == 2 or not is_wise):
                    model(torch.randn(16, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        full = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
        return torch.cat([p.detach().flatten() for p in full]), count[0]

    world = World("cpu")
    said = {}
    for kind in ("ddp", "fsdp"):
        (plain, many), (found, few) = trained(kind, False), trained(kind, True)
        said[kind] = [(plain - found).abs().max().item(), plain.abs().max().item(), many, few]
    if world.is_first:
        print(json.dumps(said), flush=True)
    torch.distributed.barrier()
    os._exit(0)
"""


@pytest.mark.multi
def test_gradients_are_exchanged_once_a_step_and_weights_are_the_same(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(SCRIPT))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    said = json.loads(done.stdout.strip().splitlines()[-1])
    for error, size, _, _ in said.values():
        assert error < 1e-6 * size
    _, _, many, few = said["ddp"]
    assert many == 3 * few
