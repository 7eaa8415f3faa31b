"""Sums of a state: equal for equal states, and the first difference by its name."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import nn

from flatout.blocks.elastic.memory_slots import first_difference, state_checksums


def _parts() -> dict[str, Any]:
    torch.manual_seed(0)
    random.seed(0)
    net = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    net(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return {
        "model": net,
        "optimizer": optimizer,
        "feed": {"seed": 1, "epoch": 0, "step": 3},
        "rates": {"all": (0.5, None)},
    }


def test_equal_states_have_equal_sums() -> None:
    assert first_difference(state_checksums(**_parts()), state_checksums(**_parts())) is None


CHANGES = {
    "model/weight": lambda p: p["model"].weight.data.view(torch.int32)[1, 2].bitwise_xor_(1),
    "optimizer/state/1/exp_avg": lambda p: p["optimizer"].state[p["model"].bias]["exp_avg"].mul_(2),
    "optimizer/state/0/step": lambda p: p["optimizer"].state[p["model"].weight]["step"].add_(1),
    "optimizer/param_groups/0/lr": lambda p: p["optimizer"].param_groups[0].update(lr=0.5),
    "feed/step": lambda p: p["feed"].update(step=4),
    "random/torch": lambda p: torch.rand(1),
    "random/python/1": lambda p: random.random(),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_has_changed_is_named(name: str) -> None:
    before = state_checksums(**_parts())
    parts = _parts()
    CHANGES[name](parts)
    message = first_difference(before, state_checksums(**parts))
    assert message is not None and message.startswith(f"{name} differs: "), message


def test_what_is_missing_or_new_is_named() -> None:
    parts = _parts()
    both = state_checksums(**parts)
    less = state_checksums(**{name: parts[name] for name in ("model", "optimizer", "rates")})
    assert first_difference(both, less) == "feed/seed is missing; it was saved"
    assert first_difference(less, both) == "feed/seed was not saved, and it is there"


def test_another_shape_of_the_same_bytes_is_another_state() -> None:
    one, two = state_checksums(x={"t": torch.zeros(2, 3)}), state_checksums(x={"t": torch.zeros(3, 2)})
    assert first_difference(one, two) is not None
