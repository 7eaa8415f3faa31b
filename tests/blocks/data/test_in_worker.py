from __future__ import annotations

import os
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

from flatout.blocks.data.in_worker import InWorker
from flatout.core.errors import UsageError

DRAWS = {
    "python": random.random,
    "numpy": np.random.random,
    "normal": np.random.randn,
    "torch": lambda: torch.rand(()).item(),
    "none": lambda: 0.0,
}


class Noisy(Dataset[Any]):
    """Items with noise from a global generator."""

    def __init__(self, source: str = "numpy", broken_at: int = -1) -> None:
        self.source, self.broken_at, self.scale = source, broken_at, 1.0

    def __len__(self) -> int:
        return 22

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if index == self.broken_at:
            raise ValueError(f"item {index} is broken")
        noise = [float(DRAWS[self.source]()) for _ in range(1 + index % 3)]
        return torch.full((3,), index + self.scale * sum(noise)), index


def epochs(loader: Any, *, draw: str = "none", num: int = 3) -> list[Any]:
    """What came out in these epochs, what the steps between drew, and where the generators stood after each."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    found: list[Any] = []
    for epoch in range(num):
        for step, (x, y) in enumerate(loader):
            found += [x.tolist(), y.tolist(), DRAWS[draw]()]
            if epoch == 1 and step == 2:
                break  # an epoch that is left early
        found += [random.random(), np.random.random(), torch.rand(2).tolist()]
    return found


@pytest.mark.parametrize("source", DRAWS)
@pytest.mark.parametrize("options", [{"shuffle": True}, {"drop_last": True}])
@pytest.mark.slow
def test_batches_and_random_numbers_are_the_same_to_the_last_bit(source: str, options: dict[str, Any]) -> None:
    other = "torch" if source != "torch" else "python"
    expected = epochs(DataLoader(Noisy(source), 4, **options), draw=other)
    assert epochs(InWorker(DataLoader(Noisy(source), 4, **options)), draw=other) == expected


@pytest.mark.parametrize("source", ["python", "numpy", "torch"])
def test_batches_are_made_again_where_steps_draw_from_the_generator_of_the_items(source: str) -> None:
    expected = epochs(DataLoader(Noisy(source), 4, shuffle=True), draw=source)
    with pytest.warns(UserWarning, match="Noisy draw from .* generator, and so do the steps"):
        assert epochs(InWorker(DataLoader(Noisy(source), 4, shuffle=True)), draw=source) == expected


def test_a_step_that_draws_now_and_then_changes_nothing() -> None:
    def drawn(loader: Any) -> list[Any]:
        torch.manual_seed(0)
        return [[x.tolist(), torch.rand(()).item() if step == 2 else 0] for step, (x, _) in enumerate(loader)]

    expected = drawn(DataLoader(Noisy("torch"), 3))
    assert drawn(InWorker(DataLoader(Noisy("torch"), 3))) == expected


def test_a_sampler_that_draws_batch_by_batch_is_refused() -> None:
    class Drawing:
        def __iter__(self) -> Iterator[list[int]]:
            for _ in range(5):
                yield [random.randrange(22), random.randrange(22)]

    with pytest.raises(UsageError, match="sampler draws from Python's generator batch by batch"):
        list(InWorker(DataLoader(Noisy(), batch_sampler=Drawing())))  # type: ignore[arg-type]


def test_a_data_set_that_was_changed_meanwhile_is_read_as_it_is_now() -> None:
    def scaled(loader: Any) -> list[Any]:
        found = epochs(loader, num=1)
        loader.dataset.scale = 5.0
        return found + epochs(loader, num=1)

    assert scaled(InWorker(DataLoader(Noisy("python"), 5))) == scaled(DataLoader(Noisy("python"), 5))


def test_a_generator_of_the_data_sets_own_goes_on_in_later_epochs() -> None:
    class Own(Noisy):
        def __init__(self) -> None:
            super().__init__("none")
            self.own = np.random.default_rng(3)

        def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
            return torch.tensor(self.own.random()), index

    values = [
        [x.tolist() for _ in range(3) for x, _ in loader]
        for loader in (DataLoader(Own(), 4), InWorker(DataLoader(Own(), 4)))
    ]
    assert values[0] == values[1]


def test_a_loader_that_is_begun_again_on_the_way_gives_both_their_batches() -> None:
    def mixed(loader: Any) -> list[Any]:
        np.random.seed(0)
        found = []
        for step, (x, _) in enumerate(loader):
            found.append(x.tolist())
            if step in (1, 3):
                found.append(next(iter(loader))[0].tolist())
        return [*found, np.random.random()]

    assert mixed(InWorker(DataLoader(Noisy(), 4))) == mixed(DataLoader(Noisy(), 4))


def test_a_list_is_a_data_set() -> None:
    assert [batch.tolist() for batch in InWorker(DataLoader([1, 2, 3], 2))] == [[1, 2], [3]]  # type: ignore[arg-type]


def test_one_other_process_makes_the_batches_of_all_epochs() -> None:
    class Places(Dataset[int]):
        def __len__(self) -> int:
            return 6

        def __getitem__(self, index: int) -> int:
            return os.getpid()

    loader = InWorker(DataLoader(Places(), 2))
    places = {int(pid) for _ in range(3) for batch in loader for pid in batch}
    assert len(places) == 1 and os.getpid() not in places


def test_an_error_comes_out_where_its_batch_would_have() -> None:
    seen = []
    with pytest.raises(ValueError, match="item 9 is broken"):
        for _, index in InWorker(DataLoader(Noisy(broken_at=9), 4)):
            seen.append(index[0].item())
    assert seen == [0, 4]


def test_what_it_cannot_read_is_refused() -> None:
    data = TensorDataset(torch.arange(4))
    assert list(InWorker(DataLoader(TensorDataset(torch.arange(0)), 2))) == []
    with pytest.raises(ValueError, match="worker"):
        InWorker(DataLoader(data, 2, num_workers=1))
    with pytest.raises(ValueError, match="collate"):
        InWorker(DataLoader(data, None))
    with pytest.raises(ValueError, match="ahead"):
        InWorker(DataLoader(data, 2), ahead=0)
