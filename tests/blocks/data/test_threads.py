from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

from flatout.blocks.data.prefetch import Threads


class Squares(Dataset[Any]):
    def __init__(self, broken_at: int = -1) -> None:
        self.broken_at = broken_at

    def __len__(self) -> int:
        return 30

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if index == self.broken_at:
            raise ValueError(f"item {index} is broken")
        return torch.full((3,), float(index)) ** 2, index


def epochs(loader: Any) -> list[Any]:
    torch.manual_seed(0)
    found = [(x, y, torch.rand(1)) for _ in range(3) for x, y in loader]
    return [*found, torch.rand(1)]


@pytest.mark.parametrize("options", [{"shuffle": True}, {"drop_last": True}, {"collate_fn": lambda items: items[0]}])
@pytest.mark.parametrize("num_threads", [1, 3])
def test_batches_and_random_numbers_are_the_same(options: dict[str, Any], num_threads: int) -> None:
    expected = epochs(DataLoader(Squares(), 4, **options))
    found = epochs(Threads(DataLoader(Squares(), 4, **options), num_threads))
    assert len(found) == len(expected)
    for one, two in zip(found, expected, strict=True):
        assert all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(one, two, strict=True))


def test_an_error_comes_out_where_its_batch_would_have() -> None:
    seen = []
    with pytest.raises(ValueError, match="item 9 is broken"):
        for _, index in Threads(DataLoader(Squares(broken_at=9), 4), 2):
            seen.append(index[0].item())
    assert seen == [0, 4]


def test_loaders_with_workers_or_without_batches_are_refused() -> None:
    data = TensorDataset(torch.arange(4))
    with pytest.raises(ValueError, match="worker"):
        Threads(DataLoader(data, 2, num_workers=1))
    with pytest.raises(ValueError, match="collate"):
        Threads(DataLoader(data, None))
    with pytest.raises(ValueError, match="num_threads"):
        Threads(DataLoader(data, 2), 0)
