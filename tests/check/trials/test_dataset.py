"""A data set asked for its items by hand: whether they repeat, and what they would cost from memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from flatout.check.observe.collectors.loaders import LoaderUse
from flatout.check.trials.context import Scene
from flatout.check.trials.dataset import _are_stackable
from flatout.check.trials.runner import run_trials
from flatout.core.records.trial import TimeDataset, TrialResult
from flatout.core.runtime.source_sites import Sites


class Graph:
    """A graph as packages hold them: no mapping, no comparison of its own, its tensors in a store that knows its owner."""

    def __init__(self, x: Tensor, label: int) -> None:
        self.store = Store(self, x, label)

    def to_dict(self) -> dict[str, Any]:
        return {"x": self.store.x, "label": self.store.label}


class Store:
    def __init__(self, owner: object, x: Tensor, label: int) -> None:
        self.owner = owner
        self.x = x
        self.label = label


class Plain:
    """An object whose state is its attributes."""

    def __init__(self, x: Tensor) -> None:
        self.inner = {"x": x}


@dataclass
class Sample:
    """A dataclass, whose comparison would compare tensors."""

    x: Tensor


class Opaque:
    """Holds its numbers where Python sees none of them."""

    __slots__ = ("_numbers",)

    def __init__(self, numbers: Tensor) -> None:
        self._numbers = numbers


class Of(Dataset[object]):
    def __init__(self, make: Callable[[int], object]) -> None:
        self.make = make

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> object:
        if not isinstance(index, int):
            raise TypeError("one index at a time")
        return self.make(index)


def tried(make: Callable[[int], object], collate: Callable[[list[Any]], object] = list) -> TrialResult:
    loader = DataLoader(Of(make), batch_size=8, collate_fn=collate)
    scene = Scene(
        examples=[],
        num_calls=[],
        roots=[],
        optimizers=[],
        outputs=[],
        loaders=[LoaderUse(iter(loader), 0, Sites())],
        unused_modules=(),
        device="cpu",
        limit_s=0.6,
    )
    [result] = run_trials([TimeDataset(loader=0)], scene, budget_s=20.0)
    assert not result.refused
    return result


def ready(index: int) -> Tensor:
    return torch.full((3,), float(index))


@pytest.mark.slow
@pytest.mark.parametrize("wrap", [lambda x: Graph(x, 1), Plain, Sample, lambda x: (x, "name"), lambda x: x.numpy()])
def test_items_are_compared_by_what_they_hold(wrap: Callable[[Tensor], object]) -> None:
    assert tried(lambda index: wrap(ready(index))).facts["repeatable"] is True
    assert tried(lambda index: wrap(torch.randn(3))).facts["repeatable"] is False


@pytest.mark.slow
def test_of_items_that_cannot_be_compared_nothing_is_claimed() -> None:
    result = tried(lambda index: Opaque(ready(index)))
    assert "repeatable" not in result.facts
    assert result.cured_s is None


@pytest.mark.slow
def test_a_batch_without_tensors_does_not_come_from_memory_for_nothing() -> None:
    result = tried(lambda index: f"text {index}")
    assert result.facts["repeatable"] is True
    assert result.now_s is not None
    assert result.cured_s is None


@pytest.mark.slow
def test_a_batch_of_tensors_is_priced_from_memory() -> None:
    result = tried(ready, collate=torch.stack)
    assert result.cured_s is not None
    assert result.now_s is not None
    assert 0 < result.cured_s <= result.now_s


@pytest.mark.parametrize(
    ("items", "expected"),
    [
        ([(torch.zeros(3), 1), (torch.ones(3), 2)], True),
        ([(np.zeros((2, 2)), np.int64(1), 0.5, True)] * 2, True),
        ([[torch.zeros(3)]] * 2, True),
        ([(torch.zeros(3), 1), (torch.ones(4), 2)], False),
        ([(torch.zeros(3), 1), (torch.ones(3), 2.0)], False),
        ([(torch.zeros(3), "cat")] * 2, False),
        ([{"x": torch.zeros(3)}] * 2, False),
        ([torch.zeros(3)] * 2, False),
        ([()] * 2, False),
    ],
)
def test_items_can_be_stacked_where_all_have_the_same_layout(items: list[Any], expected: bool) -> None:
    assert _are_stackable(items) is expected
