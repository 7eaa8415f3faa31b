"""Draws that depend on the shape alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from flatout.tune.verify.ordered_draws import ordered_draws

DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "randn_like": torch.randn_like,
    "rand_like": torch.rand_like,
    "normal_": lambda x: torch.empty_like(x).normal_(),
    "uniform_": lambda x: torch.empty_like(x).uniform_(-1, 1),
    "exponential_": lambda x: torch.empty_like(x).exponential_(),
    "bernoulli": lambda x: torch.bernoulli(torch.full_like(x, 0.3)),
    "dropout": lambda x: nn.functional.dropout(torch.ones_like(x), 0.3),
    "multinomial": lambda x: torch.multinomial(torch.full_like(x[0, 0], 0.5), 3).to(x.dtype),
}


def drawn(draw: Callable[[Tensor], Tensor], like: Tensor) -> Tensor:
    torch.manual_seed(0)
    return draw(like)


@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.parametrize(
    "like",
    [
        torch.zeros(4, 3, 8, 6, dtype=torch.float64),
        torch.zeros(4, 3, 8, 6).to(memory_format=torch.channels_last),
        torch.zeros(4, 3, 8, 6, dtype=torch.float64).to(memory_format=torch.channels_last),
    ],
    ids=["float64", "channels last", "both"],
)
def test_dtype_and_memory_format_change_no_draw(name: str, like: Tensor) -> None:
    usual = drawn(DRAWS[name], torch.zeros(4, 3, 8, 6))
    with ordered_draws():
        found = drawn(DRAWS[name], like)
    assert torch.equal(found.float(), usual)


def test_what_is_contiguous_and_float32_draws_as_ever() -> None:
    like = torch.zeros(100)
    usual = {name: drawn(draw, like) for name, draw in DRAWS.items() if name != "multinomial"}
    with ordered_draws():
        assert all(torch.equal(drawn(DRAWS[name], like), numbers) for name, numbers in usual.items())


def test_afterwards_and_where_it_is_not_wanted_everything_is_as_before() -> None:
    like = torch.zeros(100, dtype=torch.float64)
    before = drawn(torch.randn_like, like)
    with ordered_draws(lambda: False):
        assert torch.equal(drawn(torch.randn_like, like), before)
    assert torch.equal(drawn(torch.randn_like, like), before)


def test_a_generator_of_the_script_is_used() -> None:
    like = torch.zeros(10)
    usual = torch.empty_like(like).normal_(generator=torch.Generator().manual_seed(3))
    with ordered_draws():
        found = torch.empty(10, dtype=torch.float64).normal_(generator=torch.Generator().manual_seed(3))
    assert torch.equal(found.float(), usual)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_code_that_falls_back_draws_alike() -> None:
    images = torch.rand(2, 3, 8, 8)
    with ordered_draws(), torch._inductor.config.patch(fallback_random=True):
        compiled = torch.compile(lambda x: nn.functional.dropout(x * 2, 0.5))
        usual = drawn(compiled, images)
        last = drawn(compiled, images.to(memory_format=torch.channels_last))
    assert torch.equal(usual, drawn(lambda x: nn.functional.dropout(x * 2, 0.5), images))
    assert torch.equal(usual, last)
