from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flatout.core.errors import UsageError
from flatout.machine.measure.weightless import Step, weigh
from flatout.tune.verify.expect.api import expect


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.norm(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        x = x + self.out(seen)
        return x + self.feed(x)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(64, 128, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.gru(x)[0]


def convolutions() -> nn.Module:
    layers = [
        nn.Sequential(nn.Conv2d(16 if i else 3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()) for i in range(4)
    ]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1))


def wide() -> nn.Module:
    return nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512))


def training(
    model: Callable[[], nn.Module], shape: tuple[int, ...], optimizer: Any, **options: Any
) -> Callable[[], Step]:
    def make() -> Step:
        net = model()
        update = optimizer(net.parameters(), **options)

        def step() -> None:
            update.zero_grad()
            net(torch.randn(shape)).square().mean().backward()
            update.step()

        return step

    return make


MAKES = {
    "transformer": training(
        lambda: nn.Sequential(*(Block(128, 4) for _ in range(3))), (4, 128, 128), torch.optim.AdamW
    ),
    "wide, momentum": training(wide, (256, 512), torch.optim.SGD, lr=0.1, momentum=0.9),
    "wide, foreach": training(wide, (256, 512), torch.optim.AdamW, foreach=True),
    "convolutions": training(convolutions, (8, 3, 32, 32), torch.optim.Adam),
    "recurrent": training(Recurrent, (16, 40, 64), torch.optim.Adam),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MAKES)
def test_a_step_without_data_holds_what_a_real_one_does(name: str) -> None:
    make = MAKES[name]
    found = weigh(make)
    step = make()
    step()
    with expect() as seen:  # counts what the region allocates; that it lets old gradients go makes no room there
        step()
    assert seen.peak_bytes is not None
    own = found.peak_bytes - (found.persistent_bytes - found.gradient_bytes)
    assert own == pytest.approx(seen.peak_bytes, rel=0.01)


def test_weights_gradients_and_state_are_told_apart() -> None:
    found = weigh(MAKES["wide, foreach"])
    bytes_of_weights = 4 * (512 * 2048 + 2048 + 2048 * 512 + 512)
    assert found.weight_bytes == found.gradient_bytes == bytes_of_weights
    assert found.built_bytes == bytes_of_weights
    assert found.persistent_bytes == pytest.approx(4 * bytes_of_weights, rel=1e-3)  # weights, gradients, two moments


def test_a_large_model_takes_no_memory_and_nothing_stays_behind() -> None:
    def make() -> Step:
        net = nn.Sequential(*(nn.Linear(16384, 16384, bias=False) for _ in range(64)))  # 64 GiB
        return lambda: net(torch.randn(8, 16384)).sum().backward()

    before = F.scaled_dot_product_attention, torch.get_rng_state()
    found = weigh(make)
    gc.collect()
    assert found.weight_bytes == 64 * 16384**2 * 4
    assert F.scaled_dot_product_attention is before[0]
    assert torch.equal(torch.get_rng_state(), before[1])
    assert torch.ones(1).device.type == "cpu"
    assert not nn.modules.module._global_parameter_registration_hooks


def test_a_step_that_looks_at_values_is_told() -> None:
    def make() -> Step:
        net = nn.Linear(4, 4)
        return lambda: print(net(torch.randn(2, 4)).sum().item())

    with pytest.raises(UsageError, match="cannot be run on tensors without data"):
        weigh(make)

    def wrong() -> Step:
        net = nn.Linear(4, 4)
        return lambda: net(torch.randn(2, 5))

    with pytest.raises(RuntimeError, match="reduction dim"):  # the step's own error stays what it is
        weigh(wrong)
    with pytest.raises(UsageError, match="it must return the step"):
        weigh(lambda: nn.Linear(2, 2)(torch.ones(1, 2)))  # type: ignore[arg-type, return-value]
