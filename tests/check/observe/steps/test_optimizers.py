"""What is noted of an optimizer when it first steps."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from flatout.check.observe.steps.optimizers import OptimizerWatched, Optimizing
from flatout.core.runtime.patches import Patches
from flatout.core.runtime.source_sites import Sites


@pytest.mark.parametrize("is_sparse", [True, False])
def test_fused_kernels_take_no_sparse_gradients(is_sparse: bool) -> None:
    table = nn.Embedding(10, 4, sparse=is_sparse)
    optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
    table(torch.tensor([1, 2])).sum().backward()
    assert OptimizerWatched(optimizer, 0, 0).fused_supported is not is_sparse
    if is_sparse:
        with pytest.raises(RuntimeError, match="sparse"):
            fused = torch.optim.SGD(table.parameters(), lr=0.1, fused=True)
            fused.step()


class Borders:
    """Notes how steps ended."""

    def __init__(self) -> None:
        self.ends: list[tuple[bool, bool]] = []

    def on_optimizer_end(self, optimizer: int, *, is_border: bool, leader_changed: bool) -> None:
        self.ends.append((is_border, leader_changed))

    def __getattr__(self, name: str) -> object:
        return lambda *args, **kwargs: None


@pytest.fixture
def parameter() -> torch.Tensor:
    parameter = torch.zeros(1, requires_grad=True)
    parameter.grad = torch.ones(1)
    return parameter


@pytest.fixture
def borders() -> Iterator[Borders]:
    """The borders of the steps of all optimizers, as they are observed."""
    patches, borders = Patches(), Borders()
    optimizing = Optimizing(Sites(), borders)
    optimizing.install(patches)
    optimizing.is_active = True
    yield borders
    optimizing.remove()
    patches.undo()


def test_optimizers_that_come_and_go_with_the_ids_of_others_disturb_no_step(
    parameter: torch.Tensor, borders: Borders
) -> None:
    for fold in range(60):
        optimizer = torch.optim.SGD([parameter], lr=0.1)
        for _ in range(1 + fold % 4):
            optimizer.step()
        if fold % 3 == 0:
            other = torch.optim.SGD([parameter], lr=0.1)
            other.step()
            del other
        del optimizer

    assert len(borders.ends) == sum(1 + fold % 4 + (fold % 3 == 0) for fold in range(60))


def test_an_optimizer_in_place_of_one_that_is_gone_goes_on_with_its_steps(
    parameter: torch.Tensor, borders: Borders
) -> None:
    for _ in range(3):
        optimizer = torch.optim.SGD([parameter], lr=0.1)
        for _ in range(5):
            optimizer.step()
        del optimizer

    assert all(is_border for is_border, _ in borders.ends)
    assert not any(has_changed for _, has_changed in borders.ends[1:])
