from __future__ import annotations

import pytest
import torch
from tests.lever_tools import pulled
from tests.tune.levers.graph.test_pointwise_convolution import run
from torch import nn

from flatout.core.records.lever import Candidate, Refusal
from flatout.tune.levers.graph.pad_channels import LEVER


@pytest.mark.parametrize(("weight", "channels"), [((16, 3, 7, 7), 3), ((3, 8, 3, 3), 8)])
def test_convolutions_of_few_channels_on_a_gpu_are_proposed(weight: tuple[int, ...], channels: int) -> None:
    [candidate] = LEVER.propose(run(weight=weight, channels=channels).build(), ())
    assert isinstance(candidate, Candidate)
    assert candidate.saved_s == (0.0, pytest.approx(0.8 * 0.04))


@pytest.mark.parametrize(
    ("weight", "device_s", "op_s", "why"),
    [
        ((16, 3, 7, 7), None, 0.02, "processors"),
        ((16, 3, 7, 7), 0.099, 0.0001, "take 0.20 ms"),
        ((16, 3, 7), 0.099, 0.02, "take 0.00 ms"),
        ((16, 8, 7, 7), 0.099, 0.02, "take 0.00 ms"),
    ],
)
def test_what_gains_nothing_is_refused(weight: tuple[int, ...], device_s: float | None, op_s: float, why: str) -> None:
    built = run(weight=weight, channels=weight[1], device_s=device_s, op_s=op_s)
    [refusal] = LEVER.propose(built.build(), ())
    assert isinstance(refusal, Refusal) and why in refusal.because


def test_layers_are_padded_from_the_first_call_on_and_plain_again_afterwards() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 16, 3), nn.Conv2d(16, 9, 3))
    x = torch.randn(2, 3, 9, 9)
    wanted = net(x)
    with pulled(LEVER) as hooks:
        torch.testing.assert_close(net(x), wanted)
        assert type(net[0]) is not nn.Conv2d and type(net[1]) is nn.Conv2d and hooks.done == [LEVER.id]
    assert type(net[0]) is nn.Conv2d
