"""What is seen of loaders, and that trying a data set by hand changes nothing of it."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, Subset, TensorDataset

from flatout.check.capture import Capture, Propose
from flatout.check.observe.collectors.loaders import is_in_ram
from flatout.check.observe.steps.schedule import Schedule
from flatout.core.records.evidence import Evidence
from flatout.core.records.trial import TimeDataset, TimeWorkers, TrialResult


class Noisy(Dataset[Tensor]):
    """Items with noise from a generator of its own, counted."""

    def __init__(self, num: int = 64) -> None:
        self.rows = torch.arange(num * 8.0).reshape(num, 8)
        self.chance = random.Random(0)
        self.num_asked = 0

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Tensor:
        self.num_asked += 1
        return self.rows[index] + self.chance.random()


class Rows(Noisy):
    """Views of one tensor."""

    def __getitem__(self, index: int) -> Tensor:
        return self.rows[index]


def train(loader: DataLoader[Tensor], epochs: int) -> None:
    torch.manual_seed(0)
    net = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-4)
    for _ in range(epochs):
        for x in loader:
            net(x).mean().backward()
            optimizer.step()


def observe(loop: Callable[[], object], propose: Propose = lambda _: ()) -> Evidence:
    capture = Capture(command=("test",), cwd=".", schedule=Schedule(), machine=None, propose=propose)
    capture.start()
    try:
        loop()
    finally:
        evidence = capture.finish(exit="finished", exit_code=0)
    return evidence


def fetched(dataset: Dataset[Tensor], **options: object) -> TrialResult:
    loader: DataLoader[Tensor] = DataLoader(dataset, **(options or {"batch_size": 8}))  # type: ignore[arg-type]
    evidence = observe(lambda: train(loader, 4), lambda _: (TimeDataset(loader=0),))
    [result] = evidence.trials
    assert not result.refused
    return result


def test_the_lines_settings_and_epochs_of_a_loader_are_observed() -> None:
    def loop() -> None:
        train(DataLoader(Rows(), batch_size=8, shuffle=True), epochs=5)  # created here

    [loader] = observe(loop).loaders

    assert loader.num_epochs == pytest.approx(4 / 39, abs=0.002)
    assert loader.first_wait_s > 0
    assert (loader.sampler, loader.prefetch_factor, loader.persistent_workers) == ("RandomSampler", 0, False)
    assert not loader.is_in_ram


def test_the_line_that_created_the_loader_is_observed() -> None:
    def loop() -> None:
        train(DataLoader(Rows(), batch_size=8), epochs=4)  # created here

    evidence = observe(loop)
    source = evidence.source_of(evidence.loaders[0].constructed)
    assert source is not None
    assert source.text.endswith("# created here")


def test_a_loader_that_takes_a_data_set_over_names_the_line_of_the_first() -> None:
    def prepared(first: DataLoader[Tensor]) -> DataLoader[Tensor]:
        return DataLoader(first.dataset, batch_sampler=first.batch_sampler)  # as a library makes it

    def loop() -> None:
        loader = DataLoader(Rows(), batch_size=8)  # created here
        train(prepared(loader), epochs=4)

    evidence = observe(loop)
    [loader] = evidence.loaders
    constructed, first = evidence.source_of(loader.constructed), evidence.source_of(loader.taken_from)
    assert constructed is not None and constructed.text.endswith("# as a library makes it")
    assert first is not None and first.text.endswith("# created here")


def test_two_loaders_that_are_both_read_did_not_take_over() -> None:
    def loop() -> None:
        data = Rows()
        first = DataLoader(data, batch_size=8)
        second = DataLoader(data, batch_size=8)
        net = nn.Linear(8, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-4)
        for _ in range(4):
            for x, y in zip(first, second, strict=True):
                net(x + y).mean().backward()
                optimizer.step()

    assert [loader.taken_from for loader in observe(loop).loaders] == [-1, -1]


def test_other_loaders_over_the_same_data_set_do_not_restart_the_training_loader() -> None:
    """An endless loader that is iterated over once, beside an evaluation that makes a loader each time."""

    def loop() -> None:
        data, net = Rows(), nn.Linear(8, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-4)
        sampler = RandomSampler(data, replacement=True, num_samples=10_000)
        endless = iter(DataLoader(data, batch_size=8, sampler=sampler))  # training
        for step in range(40):
            net(next(endless)).mean().backward()
            optimizer.step()
            if step % 5 == 4:
                for x in DataLoader(data, batch_size=32):  # evaluation
                    with torch.no_grad():
                        net(x)

    evidence = observe(loop)

    epochs = {evidence.sources[u.constructed].text.rpartition("# ")[2]: u.num_epochs for u in evidence.loaders}
    assert epochs["training"] == 0
    assert epochs["evaluation"] > 0


def test_a_batch_looked_at_before_the_loop_is_no_epoch_of_it() -> None:
    def loop() -> None:
        loader = DataLoader(Rows(512), batch_size=8)
        next(iter(loader))
        train(loader, epochs=1)

    evidence = observe(loop)

    assert [u.num_epochs for u in evidence.loaders if evidence.sources[u.source].text == "for x in loader:"] == [0]


def test_a_loader_made_anew_in_each_epoch_starts_as_often() -> None:
    def loop() -> None:
        data, net = Rows(), nn.Linear(8, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-4)
        for _ in range(5):
            for x in DataLoader(data, batch_size=8):
                net(x).mean().backward()
                optimizer.step()

    [loader] = observe(loop).loaders
    assert loader.num_epochs == pytest.approx(4 / 39, abs=0.002)


class Pause(nn.Module):
    """A transform as torchvision writes them: a module, here one that takes its time."""

    SECONDS = 2e-3

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()), requires_grad=False)

    def forward(self, row: Tensor) -> Tensor:
        time.sleep(self.SECONDS)
        return row * self.scale


class Transformed(Rows):
    """Rows that go through a module."""

    def __init__(self) -> None:
        super().__init__()
        self.transform = Pause()

    def __getitem__(self, index: int) -> Tensor:
        return self.transform(self.rows[index])  # type: ignore[no-any-return]


class Nested(IterableDataset[Tensor]):
    """What another loader yields, through a module once more."""

    def __init__(self) -> None:
        self.transform = Pause()

    def __iter__(self) -> Iterator[Tensor]:
        return map(self.transform, DataLoader(Rows(), batch_size=8))


@pytest.mark.slow
@pytest.mark.parametrize(("batch_s", "name"), [(8 * Pause.SECONDS, "transform"), (Pause.SECONDS, "nested")])
def test_a_module_that_transforms_data_is_part_of_the_loader(batch_s: float, name: str) -> None:
    """Not a forward: what it takes is waiting for data, and it is no model."""

    def loop() -> None:
        loader = (
            DataLoader(Transformed(), batch_size=8) if name == "transform" else DataLoader(Nested(), batch_size=None)
        )
        train(loader, 4)

    evidence = observe(loop)

    assert evidence.steps.phases["data"] >= 0.9 * batch_s  # less what observing is estimated to cost
    assert [m.name for m in evidence.models] == ["Linear"]


def test_rows_of_tensors_are_known_inside_torchs_wrappers() -> None:
    data = TensorDataset(torch.zeros(4, 2))
    assert is_in_ram(Subset(data, [0, 1]))
    assert is_in_ram(torch.utils.data.ConcatDataset([data, data]))
    assert not is_in_ram(Noisy())


@pytest.mark.slow
def test_trying_a_data_set_by_hand_leaves_its_own_state_alone() -> None:
    plain, observed = Noisy(), Noisy()
    train(DataLoader(plain, batch_size=8), 4)

    fetched(observed)

    assert observed.num_asked == plain.num_asked
    assert observed.chance.random() == plain.chance.random()


@pytest.mark.slow
def test_random_items_and_views_are_distinguished() -> None:
    noisy, rows = fetched(Noisy()), fetched(Rows())
    assert (noisy.facts["repeatable"], noisy.facts["views"]) == (False, False)
    assert (rows.facts["repeatable"], rows.facts["views"], rows.facts["takes_batches"]) == (True, True, True)
    assert rows.parts["item_bytes"] == 32


@pytest.mark.slow
def test_a_loader_that_indexes_whole_batches_has_nothing_to_gain() -> None:
    data = Rows()
    result = fetched(data, sampler=BatchSampler(RandomSampler(data), 8, drop_last=True), batch_size=None)
    assert not result.facts["item_by_item"]
    assert result.now_s == result.cured_s


def test_a_data_set_that_works_in_no_other_process_is_refused() -> None:
    class AtHome(Noisy):
        home = os.getpid()

        def __getitem__(self, index: int) -> Tensor:
            if os.getpid() != self.home:
                raise OSError("away from home")
            return super().__getitem__(index)

    evidence = observe(lambda: train(DataLoader(AtHome(), batch_size=8), 4), lambda _: (TimeDataset(loader=0),))

    [result] = evidence.trials
    assert "away from home" in result.refused


@pytest.mark.slow
@pytest.mark.long
def test_a_sweep_of_workers_ends_them_and_leaves_random_streams_alone() -> None:
    trial = TimeWorkers(loader=0, counts=(1, 2), model=0)
    loader: DataLoader[Tensor] = DataLoader(Noisy(), batch_size=8)
    children = len(torch.multiprocessing.active_children())

    def loop() -> None:
        train(loader, 4)

    plain = DataLoader(Noisy(), batch_size=8)
    train(plain, 4)
    expected = torch.rand(2)
    evidence = observe(loop, lambda _: (trial,))

    assert torch.equal(torch.rand(2), expected)
    [result] = evidence.trials
    assert not result.refused
    assert {"1", "2", "start", "again"} == set(result.parts)
    assert len(torch.multiprocessing.active_children()) == children
    assert evidence.loaders[0].num_epochs == pytest.approx(3 / 31, abs=0.01), "the trial's epochs are not the user's"
