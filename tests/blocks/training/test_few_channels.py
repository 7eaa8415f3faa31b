"""Convolutions of few channels computed with eight, against float64."""

from __future__ import annotations

import copy

import pytest
import torch
from tests.blocks.training.test_pointwise_convolutions import DEVICES, LAYOUTS, error, gradients
from torch import Tensor, nn

import flatout
from flatout.blocks.training.few_channels import PaddedConvolution


class Net(nn.Module):
    """From three channels and to three again, one layer without a bias, and one that pads by reflection."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 7, padding=3, stride=2, bias=False)
        self.inner = nn.Conv2d(16, 16, 3, padding=1)
        self.mirrored = nn.Conv2d(16, 5, 3, padding=1, padding_mode="reflect")
        self.last = nn.Conv2d(5, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.mirrored(torch.relu(self.inner(torch.tanh(self.first(x)))))))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_results_and_gradients_are_as_near_to_float64_as_those_of_plain_convolutions(
    layout: torch.memory_format, device: str
) -> None:
    torch.manual_seed(0)
    net = Net().to(device, memory_format=layout)  # type: ignore[call-overload]
    x = torch.randn(2, 3, 18, 14, device=device).to(memory_format=layout)
    exact = gradients(copy.deepcopy(net).double(), x.double())
    own, own_half = error(gradients(net, x), exact), error(gradients(net, x, half=True), exact)
    before, names = net(x), list(net.state_dict())
    undo = flatout.pad_few_channels(net)
    classes = [type(m) for m in (net.first, net.inner, net.mirrored, net.last)]
    assert classes == [PaddedConvolution, nn.Conv2d, PaddedConvolution, PaddedConvolution]
    assert error(gradients(net, x), exact) < max(2 * own, 1e-6)
    assert error(gradients(net, x, half=True), exact) < 2 * own_half
    assert net(x).stride() == before.stride() and list(net.state_dict()) == names
    torch.testing.assert_close(net.first(x[0]), net.first(x)[0])  # without a batch
    undo()
    assert type(net.first) is nn.Conv2d


@pytest.mark.parametrize("device", DEVICES)
def test_compiled_all_have_eight_channels(device: str) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    net = Net().to(device)
    x = torch.randn(2, 3, 18, 14, device=device)
    exact = gradients(copy.deepcopy(net).double(), x.double())
    flatout.pad_few_channels(net)
    weights: list[tuple[int, ...]] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> object:
        for node in graph.graph.nodes:
            if "conv2d" in str(node.target):
                weights.append(tuple(node.args[1].meta["example_value"].shape[:2]))
        return graph.forward

    torch.compile(net, backend=backend)(x)
    assert weights == [(16, 8), (16, 16), (8, 16), (8, 8)]
    torch._dynamo.reset()
    assert error(gradients(net, x, compiled=True), exact) < 1e-5


def test_wide_grouped_and_derived_layers_stay() -> None:
    class Own(nn.Conv2d):
        pass

    net = nn.ModuleList([nn.Conv2d(8, 8, 3), nn.Conv2d(4, 4, 3, groups=2), Own(3, 8, 3), nn.Conv1d(3, 8, 3)])
    before = [type(m) for m in net]
    flatout.pad_few_channels(net)
    assert [type(m) for m in net] == before
