from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.evidence_builder import EvidenceBuilder
from tests.lever_tools import pulled
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from flatout.levers.communication.prepare_in_memory import LEVER
from flatout.records.lever import Refusal


class Windows(Dataset[Any]):
    """Items of several kinds; counts how often each is made."""

    def __init__(self) -> None:
        self.num_made = 0
        self.rate = 7

    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.num_made += 1
        return {
            "x": torch.arange(4) * index,
            "pair": (index, 0.5 * index),
            "name": f"window {index}",
        }


def epochs(loader: DataLoader[Any], num: int = 3) -> list[Any]:
    torch.manual_seed(0)
    return [batch for _ in range(num) for batch in loader]


def same(one: Any, two: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, two) and one.dtype == two.dtype
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(same(one[k], two[k]) for k in one)
    if isinstance(one, (list, tuple)):
        return type(one) is type(two) and len(one) == len(two) and all(map(same, one, two))
    return bool(one == two)


@pytest.mark.parametrize("options", [{"shuffle": True}, {"drop_last": True}, {}])
def test_batches_are_the_same_bit_for_bit_and_items_are_made_once(options: dict[str, Any]) -> None:
    expected = epochs(DataLoader(Windows(), 5, **options))
    data = Windows()
    with pulled(LEVER) as seams:
        loader = DataLoader(data, 5, **options)
        found = epochs(loader)
        assert seams.done == [LEVER.id]
    assert len(found) == len(expected)
    assert all(map(same, found, expected))
    assert data.num_made == len(data) or options.get("drop_last")
    assert loader.dataset.rate == 7  # type: ignore[attr-defined]


def test_what_is_collated_by_hand_or_iterated_is_left_alone() -> None:
    class Stream(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(4))

    with pulled(LEVER) as seams:
        assert list(DataLoader(Windows(), 5, collate_fn=len)) == [5, 5, 5, 5, 3]
        assert len(list(DataLoader(Stream(), 2))) == 2
        assert not seams.done


def test_a_run_without_such_a_loader_is_refused() -> None:
    [refusal] = LEVER.propose(EvidenceBuilder().build(), [])
    assert isinstance(refusal, Refusal)
