"""Levers of replicated training on two gloo processes: the same parameters, with fewer or larger collectives."""

from __future__ import annotations

import json
from typing import Any, Final, NamedTuple

import pytest
from tests.blocks.parallel.forked import lines_of

pytestmark = [pytest.mark.multi, pytest.mark.slow]

SCRIPT = """
    import json
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
    from torch.nn.parallel import DistributedDataParallel
    from flatout.tune.apply import applied
    from flatout.core.records.lever import PlannedLever
    from flatout.core.records.plan import Plan

    STEPS = 5

    def train(rank, options, micro):
        sizes = []

        def counting(group, bucket):
            sizes.append(bucket.buffer().numel())
            return allreduce_hook(group, bucket)

        torch.manual_seed(0)
        net = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
        model = DistributedDataParallel(net, **options)
        model.register_comm_hook(None, counting)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        torch.manual_seed(rank)
        for step in range(STEPS):
            for _ in range(micro if step < STEPS - 1 else 1):
                model(torch.randn(8, 64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return torch.cat([p.detach().flatten() for p in model.parameters()]), len(sizes)

    def work():
        dist.init_process_group("gloo")
        rank = dist.get_rank()
        for name, (lever, parameters, options, micro) in json.loads(sys.argv[1]).items():
            expected, before = train(rank, options, micro)
            plan = Plan(lever=(PlannedLever(id=lever, guarantee="bounded", parameters=parameters),))
            with applied(plan) as hooks:
                found, after = train(rank, options, micro)
            others = found.clone()
            dist.broadcast(others, 0)
            error = (found - expected).norm().item() / expected.norm().item()
            report(json.dumps({"name": name, "rank": rank, "before": before, "after": after, "done": hooks.done, "error": error,
                             "exact": torch.equal(found, expected), "same": torch.equal(others, found)}))
        dist.barrier()

    as_ranks(2, work)
"""


class Case(NamedTuple):
    """A lever and its parameters, for a model replicated with these options that takes so many backwards a step."""

    lever: str
    parameters: dict[str, Any]
    options: dict[str, Any]
    micro: int


CASES: Final = {
    "cap": Case(
        "communication.bucket-gradients",
        {"bucket_cap_mb": 25, "gradient_as_bucket_view": True},
        {"bucket_cap_mb": 0.02},
        micro=1,
    ),
    "static": Case("communication.bucket-gradients", {"static_graph": True}, {"bucket_cap_mb": 0.02}, micro=1),
    "no-sync": Case("communication.no-sync", {"every": 3}, {}, micro=3),
    "no-search": Case("communication.no-unused-search", {}, {"find_unused_parameters": True}, micro=1),
}


@pytest.fixture(scope="module")
def said() -> dict[str, dict[str, Any]]:
    """What rank 0 says of each case after both have trained without the lever and with it; rank 1 ends with the same."""
    told = [json.loads(line) for line in lines_of(SCRIPT, json.dumps(CASES))]
    for name, case in CASES.items():
        of_ranks = [one for one in told if one["name"] == name]
        assert [one["done"] for one in of_ranks] == [[case.lever]] * 2
        assert all(one["same"] for one in of_ranks), "ranks must end with the same parameters"
    return {one["name"]: one for one in told if one["rank"] == 0}


@pytest.mark.parametrize(("name", "is_larger"), [("cap", True), ("static", False)])
def test_buckets_are_larger_and_the_parameters_the_same(
    said: dict[str, dict[str, Any]], name: str, is_larger: bool
) -> None:
    assert said[name]["error"] < 1e-6
    assert (2 * said[name]["after"] < said[name]["before"]) == is_larger


def test_accumulated_gradients_are_reduced_once_and_an_early_step_is_whole(said: dict[str, dict[str, Any]]) -> None:
    assert said["no-sync"]["error"] < 1e-6
    # the last step has one backward, averaged by hand
    assert (said["no-sync"]["before"], said["no-sync"]["after"]) == (13, 4)


def test_without_the_search_the_parameters_are_the_same_bit_for_bit(said: dict[str, dict[str, Any]]) -> None:
    assert said["no-search"]["exact"]
