"""Values that go through NumPy in real loops."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from flatout.check.capture import Capture
from flatout.check.observe.steps.schedule import Schedule
from flatout.check.rules.overhead.numpy_round_trip import RULE
from flatout.core.records.evidence import Evidence

Step = Callable[[nn.Module, Tensor], Tensor]


class Images(Dataset[Tensor]):
    """Items that go through NumPy in the loader's fetch, as torchvision's ToTensor makes them."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> Tensor:
        pixels = torch.full((8,), float(index)).numpy()
        return torch.from_numpy(np.sort(pixels))


def observe(step: Step) -> Evidence:
    capture = Capture(
        command=("test",), cwd=".", schedule=Schedule(trials_budget_s=0.0), machine=None, propose=lambda _: ()
    )
    net = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    capture.start()
    try:
        for batch in DataLoader(Images(), batch_size=16):
            loss = step(net, batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    finally:
        evidence = capture.finish(exit="finished", exit_code=0)
    assert not evidence.notes, evidence.notes
    return evidence


def there_and_back(net: nn.Module, batch: Tensor) -> Tensor:
    out: Tensor = net(batch)
    rows = out.detach().numpy()
    for _ in range(60):
        rows = np.sort(np.repeat(rows, 512, axis=0), axis=0)[:16]  # NumPy's work
    return (out - torch.from_numpy(np.ascontiguousarray(rows))).square().mean()


def logged(net: nn.Module, batch: Tensor) -> Tensor:
    out: Tensor = net(batch)
    np.mean(np.argmax(out.detach().numpy(), axis=1))
    noise = torch.from_numpy(np.random.default_rng(0).normal(size=(16, 8)).astype("float32"))
    return (out - noise).square().mean()


@pytest.mark.slow
def test_a_value_that_comes_back_is_found_where_numpy_works() -> None:
    evidence = observe(there_and_back)

    [trip] = evidence.round_trips
    assert (len(trip.away), len(trip.back)) == (1, 1)
    [finding] = RULE.check(evidence)
    assert finding.where is not None
    assert finding.where.text.endswith("# NumPy's work")
    assert finding.saved_s[1] <= finding.cost_s <= evidence.steps.whole_s


@pytest.mark.parametrize("step", [logged, lambda net, batch: net(batch).square().mean()], ids=["logged", "plain"])
@pytest.mark.slow
def test_logs_random_numbers_and_the_loaders_items_are_no_round_trip(step: Step) -> None:
    evidence = observe(step)

    assert not evidence.round_trips
    assert not list(RULE.check(evidence))
