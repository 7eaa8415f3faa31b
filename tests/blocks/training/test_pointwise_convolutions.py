"""Convolutions of single pixels as matrix products, against float64."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import flatout
from flatout.blocks.training.pointwise_convolutions import PointwiseConvolution

LAYOUTS = (torch.contiguous_format, torch.channels_last)
DEVICES = (
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")),
)


class Net(nn.Module):
    """Convolutions of single pixels between others, with a bias and without, and one that is shared."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.wide = nn.Conv2d(8, 24, 1, bias=False)
        self.narrow = nn.Conv2d(24, 8, 1)
        self.again = self.narrow

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x))
        x = x + self.narrow(torch.sigmoid(self.wide(x)))
        return self.again(torch.tanh(self.wide(x)))


def gradients(net: nn.Module, x: Tensor, *, compiled: bool = False, half: bool = False) -> list[Tensor]:
    x = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    call = torch.compile(net) if compiled else net
    with torch.autocast(x.device.type, torch.bfloat16, enabled=half):
        result = call(x)
    result.float().square().mean().backward() if half else result.square().mean().backward()
    found = [result.detach(), x.grad, *(p.grad for p in net.parameters())]
    net.zero_grad()
    return [t.double() for t in found if t is not None]


def error(found: list[Tensor], exact: list[Tensor]) -> float:
    return max(((a - b).norm() / b.norm()).item() for a, b in zip(found, exact, strict=True))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_results_and_gradients_are_as_near_to_float64_as_those_of_convolutions(
    layout: torch.memory_format, device: str
) -> None:
    torch.manual_seed(0)
    net = Net().to(device, memory_format=layout)  # type: ignore[call-overload]
    x = torch.randn(2, 3, 9, 7, device=device).to(memory_format=layout)
    exact = gradients(copy.deepcopy(net).double(), x.double())
    own, own_half = error(gradients(net, x), exact), error(gradients(net, x, half=True), exact)
    undo = flatout.pointwise_convolutions_as_products(net)
    assert [type(m) for m in (net.first, net.wide, net.narrow)] == [nn.Conv2d, *[PointwiseConvolution] * 2]
    assert error(gradients(net, x), exact) < max(2 * own, 1e-6)
    assert error(gradients(net, x, half=True), exact) < 2 * own_half
    assert net.wide(net.first(x)).is_contiguous(memory_format=layout)
    undo()
    assert type(net.wide) is nn.Conv2d


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # dynamo's own
@pytest.mark.parametrize("device", DEVICES)
def test_compiled_they_are_products_too(device: str) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    net = Net().to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    x = torch.randn(2, 3, 9, 7, device=device).to(memory_format=torch.channels_last)
    exact = gradients(copy.deepcopy(net).double(), x.double())
    flatout.pointwise_convolutions_as_products(net)
    targets: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> object:
        targets.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    torch.compile(net, backend=backend)(x)
    assert sum("linear" in target for target in targets) == 4 and sum("conv2d" in target for target in targets) == 1
    torch._dynamo.reset()
    assert error(gradients(net, x, compiled=True), exact) < 1e-5


def test_others_are_left_as_they_are() -> None:
    class Own(nn.Conv2d):
        pass

    others = [
        nn.Conv2d(4, 4, 3),
        nn.Conv2d(4, 4, 1, stride=2),
        nn.Conv2d(4, 4, 1, padding=1),
        nn.Conv2d(4, 4, 1, groups=2),
        Own(4, 4, 1),
        nn.Conv1d(4, 4, 1),
    ]
    changed = nn.Conv2d(4, 6, 1)
    net = nn.ModuleList([*others, changed])
    before = list(net.state_dict())
    flatout.pointwise_convolutions_as_products(net)
    assert [type(m) for m in net] == [*(type(m) for m in others), PointwiseConvolution]
    assert list(net.state_dict()) == before and isinstance(changed, nn.Conv2d)
    image = torch.randn(4, 5, 3)  # without a batch
    plain = nn.Conv2d(4, 6, 1)
    plain.load_state_dict(changed.state_dict())
    torch.testing.assert_close(changed(image), plain(image))


@pytest.mark.parametrize("of_input", LAYOUTS)
@pytest.mark.parametrize("of_weights", LAYOUTS)
def test_results_are_laid_out_as_those_of_a_convolution(
    of_weights: torch.memory_format, of_input: torch.memory_format
) -> None:
    net = nn.Conv2d(8, 16, 1).to(memory_format=of_weights)  # type: ignore[call-overload]
    x = torch.randn(2, 8, 5, 7).to(memory_format=of_input).requires_grad_()
    expected = net(x)
    grad = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, [x, *net.parameters()], grad)
    flatout.pointwise_convolutions_as_products(net)
    result = net(x)
    assert result.stride() == expected.stride()
    for a, b in zip(torch.autograd.grad(result, [x, *net.parameters()], grad), wanted, strict=True):
        torch.testing.assert_close(a, b)
