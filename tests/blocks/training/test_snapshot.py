"""copied: as a deep copy, in the memory of the copy before."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from flatout.blocks.training.snapshot import copied


def model_and_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    return model, torch.optim.Adam(model.parameters(), lr=0.1)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.randn(5, 3)).square().sum().backward()
    optimizer.step()


def state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "note": [1, "a", None]}


def same(one: Any, two: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, two) and one.dtype == two.dtype
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(same(one[k], two[k]) for k in one)
    if isinstance(one, list):
        return len(one) == len(two) and all(map(same, one, two))
    return bool(one == two)


def test_each_copy_is_a_deep_copy_in_the_same_memory() -> None:
    model, optimizer = model_and_optimizer()
    good: Any = None
    addresses = []
    for _ in range(4):
        step(model, optimizer)
        good = copied(state(model, optimizer), into=good)
        kept = copy.deepcopy(state(model, optimizer))
        step(model, optimizer)  # what is copied shares nothing with what goes on
        assert same(good, kept)
        addresses.append(good["model"]["0.weight"].data_ptr())
    assert len(set(addresses)) == 1


def test_a_copy_that_the_optimizer_has_taken_over_is_not_written_to() -> None:
    model, optimizer = model_and_optimizer()
    step(model, optimizer)
    good = copied(state(model, optimizer))
    optimizer.load_state_dict(good["optimizer"])  # the optimizer goes on with these very tensors
    step(model, optimizer)
    good = copied(state(model, optimizer), into=good)
    kept = copy.deepcopy(state(model, optimizer))
    step(model, optimizer)
    assert same(good, kept)


def test_a_state_of_another_make_is_copied_anew() -> None:
    before = copied({"a": torch.ones(2)})
    assert copied({"b": torch.ones(2)}, into=before) is not before
    after = copied({"a": torch.ones(3)}, into=before)
    assert torch.equal(after["a"], torch.ones(3))


def test_the_state_itself_is_never_taken_for_its_copy() -> None:
    live = {"a": torch.ones(2)}
    other = copied(live, into=live)
    other["a"].zero_()
    assert live["a"].sum() == 2
