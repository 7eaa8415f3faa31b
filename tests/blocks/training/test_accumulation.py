"""Two ranks accumulate: one exchange a step, the same weights."""

from __future__ import annotations

import json

import pytest
from tests.blocks.parallel.forked import lines_of

pytestmark = pytest.mark.slow

SCRIPT = """
    import json
    from torch import nn
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel
    from flatout.blocks.parallel.world import World
    from flatout.blocks.training.accumulation import accumulate_gradients

    def trained(world, kind, is_wise):
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
                with accumulate_gradients(model, is_last=micro == 2 or not is_wise):
                    model(torch.randn(16, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        full = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
        return torch.cat([p.detach().flatten() for p in full]), count[0]

    def ranks():
        with World("cpu") as world:
            said = {}
            for kind in ("ddp", "fsdp"):
                (plain, many), (found, few) = trained(world, kind, False), trained(world, kind, True)
                said[kind] = [(plain - found).abs().max().item(), plain.abs().max().item(), many, few]
            if world.is_first:
                report(json.dumps(said))
            torch.distributed.barrier()

    as_ranks(2, ranks)
"""


@pytest.mark.multi
@pytest.mark.long
def test_gradients_are_exchanged_once_a_step_and_weights_are_the_same() -> None:
    [line] = lines_of(SCRIPT)
    said = json.loads(line)
    for error, size, _, _ in said.values():
        assert error < 1e-6 * size
    _, _, many, few = said["ddp"]
    assert many == 3 * few
