from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flatout.blocks.training.offload import offload_state


def updated(kind: Any, options: dict[str, Any], *, is_offloaded: bool) -> tuple[list[Tensor], torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = kind([{"params": net[0].parameters()}, {"params": net[2].parameters(), "lr": 0.02}], lr=0.01, **options)
    if is_offloaded:
        offload_state(optimizer)
    for _ in range(5):
        optimizer.zero_grad()
        net(torch.rand(8, 4)).square().mean().backward()
        optimizer.step()
    return [p.detach() for p in net.parameters()], optimizer


@pytest.mark.parametrize(
    ("kind", "options"),
    [(torch.optim.AdamW, {"amsgrad": True}), (torch.optim.Adam, {"fused": True}), (torch.optim.SGD, {"momentum": 0.9})],
)
def test_parameters_and_state_are_the_same(kind: Any, options: dict[str, Any]) -> None:
    expected, before = updated(kind, options, is_offloaded=False)
    found, after = updated(kind, options, is_offloaded=True)
    assert all(map(torch.equal, found, expected))
    one, two = before.state_dict()["state"], after.state_dict()["state"]
    assert all(torch.equal(torch.as_tensor(one[i][k]), torch.as_tensor(two[i][k])) for i in one for k in one[i])


def test_between_steps_the_state_lies_in_one_place_until_it_is_ended() -> None:
    parameter = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.Adam([parameter])
    undo = offload_state(optimizer)
    seen = []
    for _ in range(2):
        parameter.grad = torch.ones(3)
        optimizer.step()
        seen.append(optimizer.state[parameter]["exp_avg"])
    assert seen[0] is seen[1]
    undo()
    assert optimizer.state[parameter]["exp_avg"] is not seen[1]
    assert torch.equal(optimizer.state[parameter]["exp_avg"], seen[1])


def test_loaded_state_takes_the_place_of_what_is_out() -> None:
    parameter = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([parameter], momentum=0.9)
    offload_state(optimizer)
    parameter.grad = torch.ones(3)
    optimizer.step()
    saved = optimizer.state_dict()
    saved["state"][0]["momentum_buffer"] = torch.full((3,), 5.0)
    optimizer.load_state_dict(saved)
    optimizer.step()
    assert torch.equal(optimizer.state[parameter]["momentum_buffer"], torch.full((3,), 5.5))
