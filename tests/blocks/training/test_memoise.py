from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from flatout.blocks.training.memoise import memoise
from flatout.core.errors import UsageError


class Counted:
    """A function that counts its calls."""

    def __init__(self, function: Any) -> None:
        self.num = 0

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.num += 1
            return function(*args, **kwargs)

        self.function = memoise(counted)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def test_equal_arguments_are_computed_once() -> None:
    power = Counted(lambda x, k=2: [x**k])
    assert [power(3), power(3), power(3, k=3), power(3.0)] == [[9], [9], [27], [9.0]]
    assert power.num == 3


def test_arrays_are_told_by_their_content_and_handed_out_as_copies() -> None:
    root = Counted(np.sqrt)
    x = np.arange(4.0)
    root(x)[0] = 99.0
    assert root(x.copy())[0] == 0.0 and root.num == 1
    x[0] = 4.0
    assert root(x)[0] == 2.0 and root.num == 2


def test_a_list_that_a_caller_writes_to_is_not_handed_out_again() -> None:
    words = Counted(str.split)
    words("a b").append("c")
    assert words("a b") == ["a", "b"] and words.num == 1


@pytest.mark.parametrize("size", [3, 1 << 19])
def test_a_tensor_is_computed_anew_after_a_write_to_it_or_to_the_result(size: int) -> None:
    double = Counted(lambda x: 2 * x)
    x = torch.ones(size)
    first = double(x)
    assert double(x) is first and double.num == 1
    first.zero_()
    assert double(x)[0] == 2 and double.num == 2
    x.add_(1)
    assert double(x)[0] == 4 and double.num == 3


def test_a_large_tensor_that_died_leaves_nothing_to_the_next_at_its_place() -> None:
    total = Counted(lambda x: float(x.sum()))
    for value in range(4):
        assert total(torch.full((1 << 19,), float(value))) == value * 2.0**19


def test_a_module_is_known_by_its_weights_its_buffers_and_its_mode() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.ones(2))
            self.weight = nn.Parameter(torch.ones(2))
            self.num = 0

        @memoise
        def table(self, n: int) -> Tensor:
            self.num += 1
            return self.weight.detach() * self.scale * n  # type: ignore[operator, no-any-return]

    net = Net()
    net.table(3), net.table(3)
    assert net.num == 1
    with torch.no_grad():
        net.weight.add_(1)
    assert net.table(3).tolist() == [6, 6]
    net.eval().table(3)
    with torch.no_grad():
        net.table(3)
    assert net.num == 4
    assert Net().table(3).tolist() == [3, 3]


def test_a_graph_that_a_backward_used_up_is_made_anew() -> None:
    double = Counted(lambda x: 2 * x)
    x = torch.ones(3, requires_grad=True)
    first = double(x)
    assert double(x) is first
    first.sum().backward()
    double(x).sum().backward()
    assert x.grad is not None and x.grad.tolist() == [4, 4, 4]


@pytest.mark.parametrize(
    "draw", [lambda: torch.rand(1), np.random.rand, random.random], ids=["torch", "numpy", "random"]
)
def test_a_function_that_draws_random_numbers_is_refused(draw: Any) -> None:
    with pytest.raises(UsageError, match="random numbers"):
        Counted(draw)()


def test_a_function_that_reads_a_generator_of_its_own_is_refused() -> None:
    rng = np.random.default_rng(0)

    @memoise
    def noise(n: int) -> Any:
        return rng.normal(size=n)

    with pytest.raises(UsageError, match="random numbers"):
        noise(3)


def test_what_cannot_be_compared_or_kept_is_refused() -> None:
    with pytest.raises(UsageError, match="is given a Random"):
        Counted(len)(random.Random(0))
    with pytest.raises(UsageError, match="returns a list_iterator"):
        Counted(iter)([1])


def test_results_used_longest_ago_go_first() -> None:
    made: list[int] = []

    @memoise(max_bytes=3000)
    def block(n: int) -> Tensor:
        made.append(n)
        return torch.full((250,), float(n))

    for n in (1, 2, 1, 3, 1, 2):
        assert block(n)[0] == n
    assert made == [1, 2, 3, 2]
