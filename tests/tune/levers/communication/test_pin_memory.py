from __future__ import annotations

import pytest
import torch
from tests.evidence_builder import EvidenceBuilder
from tests.lever_tools import found, pulled
from torch.utils.data import DataLoader, TensorDataset

from flatout.core.errors import EditError
from flatout.core.records.lever import Candidate, Refusal
from flatout.tune.levers.communication.pin_memory import LEVER, edit


def test_pageable_copies_of_a_loaders_batches_are_to_be_pinned() -> None:
    run = EvidenceBuilder(device_s=0.05)
    run.loader(0)
    [candidate] = LEVER.propose(run.build(), [found(0.02)])
    assert isinstance(candidate, Candidate)
    assert candidate.saved_s[1] > 0


def test_other_copies_are_refused() -> None:
    [none] = LEVER.propose(EvidenceBuilder(device_s=0.05).build(), [found(0.02)])
    [on_cpu] = LEVER.propose(EvidenceBuilder().build(), [])
    assert isinstance(none, Refusal)
    assert isinstance(on_cpu, Refusal)
    assert "DataLoader" in none.because


def test_loaders_are_made_to_pin_where_there_is_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    data = TensorDataset(torch.arange(4))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pulled(LEVER) as hooks:
        assert DataLoader(data, 2).pin_memory
        assert hooks.done == [LEVER.id]
    assert not DataLoader(data, 2).pin_memory
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pulled(LEVER):
        assert not DataLoader(data, 2).pin_memory


def test_the_call_pins_and_its_loops_do_not_wait() -> None:
    text = (
        "import torch\nfrom torch.utils.data import DataLoader\n"
        "loader = DataLoader(\n    data,\n    batch_size=4,\n)\n"
        "for i, (x, y) in enumerate(loader):\n    x, y = x.to(device), y.cuda()\n    z = x.to(torch.float64)\n"
        "for a in other:\n    a = a.to(device)\n"
    )
    assert edit(text, {}) == (
        "import torch\nfrom torch.utils.data import DataLoader\n"
        "loader = DataLoader(\n    data,\n    batch_size=4,\n    pin_memory=True,\n)\n"
        "for i, (x, y) in enumerate(loader):\n    x, y = x.to(device, non_blocking=True), y.cuda(non_blocking=True)\n"
        "    z = x.to(torch.float64)\n"
        "for a in other:\n    a = a.to(device)\n"
    )


@pytest.mark.parametrize(
    ("call", "why"),
    [
        ("DataLoader(data, **options)", "unpacked"),
        ("list(data)", "no DataLoader"),
        ("DataLoader(a), DataLoader(b)", "2 calls"),
    ],
)
def test_what_is_not_certain_is_left(call: str, why: str) -> None:
    with pytest.raises(EditError, match=why):
        edit(f"from torch.utils.data import DataLoader\nloader = {call}\n", {})
