"""Blocks that are left out: how often, the expectation of what is left, and nothing of it in evaluation."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from flatout.errors import UsageError
from flatout.training.layer_dropping import LayerDropping, kept_chance


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class Stack(nn.Module):
    def __init__(self, num: int = 4, width: int = 8) -> None:
        super().__init__()
        self.blocks, self.head = nn.Sequential(*(Residual(width) for _ in range(num))), nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x))


def model(num: int = 4) -> Stack:
    torch.manual_seed(0)
    return Stack(num)


def test_the_mean_kept_depth_is_what_theory_says() -> None:
    dropping = LayerDropping(model(), "blocks", steps=2000, lowest=0.3, rate=5.0)
    chances = [dropping.chance(block, step) for step in range(2000) for block in range(4)]
    kept = sum(dropping.is_kept(block, step) for step in range(2000) for block in range(4))
    dropping.undo()
    spread = math.sqrt(sum(p * (1 - p) for p in chances))
    assert abs(kept - sum(chances)) < 4 * spread
    assert dropping.kept_fraction() == pytest.approx(sum(chances) / len(chances))


@given(block=st.integers(0, 7), step=st.integers(0, 1000), lowest=st.floats(0.05, 1.0))
def test_deeper_and_later_blocks_are_dropped_no_less_often(block: int, step: int, lowest: float) -> None:
    options = {"num_blocks": 9, "steps": 1000, "lowest": lowest}
    chance = kept_chance(block, step, **options)  # type: ignore[arg-type]
    assert lowest - 1e-12 <= chance <= 1
    assert kept_chance(block + 1, step, **options) <= chance  # type: ignore[arg-type]
    assert kept_chance(block, step + 1, **options) <= chance  # type: ignore[arg-type]


def test_a_block_gives_its_whole_output_in_expectation() -> None:
    one = model(1)
    dropping = LayerDropping(one, "blocks", steps=1, lowest=0.4, rate=1e9)
    x = torch.randn(2, 8, generator=torch.Generator().manual_seed(1))
    whole = x + one.blocks[0].inner(x)
    outs = []
    for step in range(1, 4001):
        dropping.at(step)
        outs.append(one.blocks(x).detach())
    dropping.undo()
    mean = torch.stack(outs).mean(0)
    assert (mean - whole).abs().max() < 0.1 * (whole - x).abs().max()


def test_evaluation_is_the_model_as_it_was_bit_for_bit_and_undo_leaves_nothing() -> None:
    own, x = model(), torch.randn(3, 8)
    before = own.eval()(x)
    dropping = LayerDropping(own, "blocks", steps=10, lowest=0.1)
    dropping.at(9)
    assert torch.equal(own(x), before)
    own.train()
    dropping.undo()
    assert torch.equal(own(x), before)
    assert all("forward" not in vars(block) for block in own.blocks)


def test_draws_belong_to_seed_step_and_block_and_leave_the_random_numbers_alone() -> None:
    state = torch.get_rng_state()
    first = LayerDropping(model(), "blocks", steps=50, lowest=0.5)
    torch.set_rng_state(state)
    second, other = (LayerDropping(Stack(), "blocks", steps=50, lowest=0.5, seed=seed) for seed in (0, 1))
    drawn = [[d.is_kept(b, s) for s in range(50) for b in range(4)] for d in (first, second, other)]
    assert drawn[0] == drawn[1] != drawn[2]
    torch.set_rng_state(state)
    first.at(30)
    first._model(torch.ones(2, 8))
    assert torch.equal(torch.get_rng_state(), state)
    for dropping in (first, second, other):
        dropping.undo()


def test_a_dropped_block_gets_no_gradient_and_a_kept_one_does() -> None:
    own = model()
    dropping = LayerDropping(own, "blocks", steps=100, lowest=0.3)
    step = next(s for s in range(50, 1000) if 0 < sum(dropping.is_kept(b, s) for b in range(4)) < 4)
    dropping.at(step)
    own(torch.ones(2, 8)).sum().backward()
    kept = [block.inner.weight.grad is not None for block in own.blocks]
    assert kept == [dropping.is_kept(b, step) for b in range(4)]
    dropping.undo()


def test_the_expected_flop_is_that_of_the_blocks_kept() -> None:
    own = model()
    dropping = LayerDropping(own, "blocks", steps=10, lowest=0.5, rate=1e9)
    expected, whole = dropping.expected_flop(torch.randn(2, 8))
    dropping.undo()
    block, head = 2 * 2 * 8 * 8, 2 * 2 * 8 * 3
    assert whole == 4 * block + head
    # The first step keeps all, the other nine 1 - i/4 * 0.5 each.
    mean = [(1 + 9 * (1 - i / 4 * 0.5)) / 10 for i in (1, 2, 3, 4)]
    assert expected == pytest.approx(head + block * sum(mean))
    assert own.training and "less" in dropping.told(torch.randn(2, 8))


def test_what_cannot_be_left_out_is_refused() -> None:
    plain = nn.Sequential(nn.Sequential(nn.Linear(8, 4)))
    dropping = LayerDropping(plain, "0", steps=1)
    with pytest.raises(UsageError, match="shape"):
        plain(torch.ones(1, 8))
    dropping.undo()
    for path in ("head", "nothing"):
        with pytest.raises(UsageError):
            LayerDropping(model(), path, steps=1)
    with pytest.raises(UsageError):
        LayerDropping(model(), "blocks", steps=0)
    with pytest.raises(UsageError):
        LayerDropping(model(), "blocks", steps=1, lowest=0.0)
