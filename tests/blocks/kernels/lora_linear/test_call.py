from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils.flop_counter import FlopCounterMode

from flatout.blocks.kernels.lora_linear.call import lora_linear
from flatout.blocks.kernels.selection import select_kernel
from flatout.core.errors import UsageError


class _Adapted(nn.Module):
    def __init__(self, width: int = 32, out: int = 48, rank: int = 4) -> None:
        super().__init__()
        self.layer = nn.Linear(width, out)
        self.down, self.up = nn.Linear(width, rank, bias=False), nn.Linear(rank, out, bias=False)
        self.layer.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return lora_linear(x, self.layer, self.down, self.up, scale=2.0)

    def separate(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x) + 2.0 * self.up(self.down(x))
        return y


def _results(run: Callable[[Tensor], Tensor], net: nn.Module, x: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    y = run(x)
    trained = [p for p in net.parameters() if p.requires_grad]
    return [y, *torch.autograd.grad(y.float().square().mean(), [x, *trained])]


@pytest.fixture
def net() -> _Adapted:
    torch.manual_seed(0)
    return _Adapted()


@pytest.mark.parametrize("rows", [(64,), (4, 30), (2,)], ids=str)
def test_modules_compute_what_they_compute_apart(net: _Adapted, rows: tuple[int, ...]) -> None:
    x = torch.randn(*rows, 32)
    for one, other in zip(_results(net, net, x), _results(net.separate, net, x), strict=True):
        torch.testing.assert_close(one, other)


def test_the_choice_is_by_the_rows() -> None:
    weights = torch.ones(48, 32), torch.ones(4, 32), torch.ones(48, 4)
    assert (
        select_kernel("lora_linear", torch.ones(5, 4, 32), *weights, None, scale=1.0).kernel.id == "lora_linear.merged"
    )
    chosen = select_kernel("lora_linear", torch.ones(19, 32), *weights, None, scale=1.0)
    assert chosen.kernel.id == "lora_linear.reference"
    assert "with 19 rows" in str(chosen)


def test_an_adapter_of_zeros_changes_no_bit(net: _Adapted) -> None:
    nn.init.zeros_(net.up.weight)
    x = torch.randn(64, 32)
    assert torch.equal(net(x), net.layer(x))


def test_under_autocast_it_is_no_worse_than_apart(net: _Adapted) -> None:
    x = torch.randn(256, 32)
    exact = _results(net.double().separate, net, x.double())
    net.float()
    with torch.autocast("cpu", torch.bfloat16):
        merged, apart = _results(net, net, x), _results(net.separate, net, x)
    assert merged[0].dtype == torch.bfloat16
    assert [g.dtype for g in merged] == [g.dtype for g in apart]
    for one, other, wanted in zip(merged, apart, exact, strict=True):
        size = wanted.norm()
        assert (one.double() - wanted).norm() / size <= 2 * (other.double() - wanted).norm() / size + 2**-9


def test_frozen_weights_cost_no_gradient(net: _Adapted) -> None:
    x = torch.randn(256, 32).requires_grad_()
    counts = []
    for run in (net, net.separate):
        with FlopCounterMode(display=False) as counter:
            run(x).sum().backward()
        counts.append(counter.get_total_flops())
    wide = 2 * 256 * 32 * 48
    assert 2 * wide < counts[0] < min(counts[1], 2.5 * wide)


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "has_autocast"), [(4, False), (64, True)], ids=["float32", "autocast"])
def test_it_compiles_whole(net: _Adapted, rows: int, has_autocast: bool) -> None:
    x = torch.randn(rows, 32)
    torch.compiler.reset()
    compiled = torch.compile(net, fullgraph=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=has_autocast):
        pairs = list(zip(_results(compiled, net, x), _results(net, net, x), strict=True))
    rtol, atol = (0.02, 0.02) if has_autocast else (1e-5, 1e-6)
    for one, other in pairs:
        torch.testing.assert_close(one, other, rtol=rtol, atol=atol)


def test_it_trains_as_apart(net: _Adapted) -> None:
    x, y = torch.randn(128, 32), torch.randn(128, 48)
    start = {name: p.detach().clone() for name, p in net.state_dict().items()}
    ends = []
    for run in (net.forward, net.separate):
        net.load_state_dict(start)
        optimizer = torch.optim.AdamW([net.down.weight, net.up.weight], lr=1e-2)
        for _ in range(50):
            loss = F.mse_loss(run(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        ends.append(loss.item())
    assert ends[0] == pytest.approx(ends[1], rel=1e-4)


@pytest.mark.parametrize("is_frozen", [True, False], ids=["frozen", "trained"])
def test_gradients_can_be_differentiated_again(is_frozen: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(16, 8, dtype=torch.float64).requires_grad_()
    weight = torch.randn(8, 8, dtype=torch.float64).requires_grad_(not is_frozen)
    down, up = (torch.randn(*shape, dtype=torch.float64).requires_grad_() for shape in ((2, 8), (8, 2)))

    def run(x: Tensor, *others: Tensor) -> Tensor:
        return lora_linear(
            x, others[0] if len(others) > 2 else weight, *others[-2:], scale=0.5, kernel="lora_linear.merged"
        )

    inputs = (x, down, up) if is_frozen else (x, weight, down, up)
    assert torch.autograd.gradgradcheck(run, inputs)


def _with_hook() -> nn.Linear:
    layer = nn.Linear(3, 5)
    layer.register_forward_hook(lambda module, args, out: None)
    return layer


def _parametrized() -> nn.Module:
    return parametrize.register_parametrization(nn.Linear(3, 5), "weight", nn.Identity())


_DOWN, _UP = torch.ones(2, 3), torch.ones(5, 2)


@pytest.mark.parametrize(
    ("arguments", "options", "says"),
    [
        ((torch.ones(2, 4), torch.ones(5, 3), _DOWN, _UP), {}, "does not end in the 3 inputs"),
        ((torch.ones(2, 3), torch.ones(5, 3), _UP, _DOWN), {}, "no layer and its adapter"),
        ((torch.ones(2, 3), torch.ones(5, 3), torch.ones(3), _UP), {}, "not all matrices"),
        ((torch.ones(2, 3), torch.ones(5, 3), _DOWN, _UP, torch.ones(4)), {}, "not one number for each of 5"),
        ((torch.ones(2, 3), torch.ones(5, 3).double(), _DOWN, _UP), {}, "one dtype"),
        ((torch.ones(2, 3).long(), torch.ones(5, 3), _DOWN, _UP), {}, "floating-point"),
        ((torch.ones(2, 3), nn.Identity(), _DOWN, _UP), {}, "layer is Identity"),
        ((torch.ones(2, 3), _with_hook(), _DOWN, _UP), {}, "has hooks"),
        ((torch.ones(2, 3), _parametrized(), _DOWN, _UP), {}, "layer is ParametrizedLinear"),
        ((torch.ones(2, 3), nn.Linear(3, 5), nn.Linear(3, 2), _UP), {}, "adapter has a bias"),
        ((torch.ones(2, 3), nn.Linear(3, 5), _DOWN, _UP, torch.ones(5)), {}, "bias of its own"),
        ((torch.ones(2, 3), nn.Linear(3, 5), _DOWN, _UP), {"scale": torch.ones(())}, "scale is Tensor"),
        (
            (torch.ones(2, 3), torch.ones(5, 3), _DOWN, _UP),
            {"kernel": "lora_linear.merged"},
            "cannot run this: with 2 rows",
        ),
    ],
)
def test_what_does_not_fit_is_an_error(arguments: tuple[Any, ...], options: dict[str, Any], says: str) -> None:
    large = torch.ones(90, 70), torch.ones(2, 70), torch.ones(90, 2)
    if "kernel" in options:
        arguments = (torch.ones(2, 70), *large)
    with pytest.raises(UsageError, match=says):
        lora_linear(*arguments, **options)
