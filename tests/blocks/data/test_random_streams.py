from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from flatout.blocks.data.epochs import KeyedDataset, key_from, keyed_indices, started_from


class _Noisy(Dataset[Any]):
    """Augments with three generators, as user code does."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        import numpy as np

        return torch.tensor([index, torch.rand(()).item(), random.random(), np.random.rand()], dtype=torch.float64)


def _drawn(workers: int, batch_size: int, epoch: int = 0, seed: int = 0) -> torch.Tensor:
    indices = keyed_indices(range(12), epoch=epoch, num_samples=12)
    loader: DataLoader[Any] = DataLoader(
        KeyedDataset(_Noisy(), seed=seed), sampler=indices, batch_size=batch_size, num_workers=workers
    )
    return torch.cat(list(loader))


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "batch_size"), [(0, 5), (1, 4), (2, 3), (2, 1)])
def test_augmentations_are_the_same_for_any_workers_and_batches(workers: int, batch_size: int) -> None:
    assert torch.equal(_drawn(workers, batch_size), _drawn(0, 4))


def test_epochs_seeds_and_samples_draw_differently() -> None:
    first, second, other = _drawn(0, 4), _drawn(0, 4, epoch=1), _drawn(0, 4, seed=1)
    assert torch.equal(first[:, 0], second[:, 0])
    for column in (1, 2, 3):
        values = torch.cat([first[:, column], second[:, column], other[:, column]])
        assert len(values.unique()) == 36


def test_the_generators_of_the_process_are_left_alone() -> None:
    import numpy as np

    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    expected = torch.rand(3), random.random(), np.random.rand()
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    KeyedDataset(_Noisy())[3]
    assert torch.equal(torch.rand(3), expected[0])
    assert (random.random(), np.random.rand()) == expected[1:]


def test_generators_are_put_back_after_an_error() -> None:
    state = random.getstate()
    with pytest.raises(ValueError, match="broken"), started_from(key_from(1)):
        random.random()
        raise ValueError("broken")
    assert random.getstate() == state


def test_a_dataset_keeps_its_length_and_attributes() -> None:
    dataset = KeyedDataset(_Noisy())
    assert len(dataset) == 12
    with pytest.raises(AttributeError):
        dataset.transform  # noqa: B018
