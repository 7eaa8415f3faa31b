from __future__ import annotations

import msgspec
import pytest
import torch
from tests.evidence_builder import EvidenceBuilder
from tests.lever_tools import pulled
from torch import nn

from flatout.core.errors import EditError
from flatout.core.records.evidence import Evidence
from flatout.core.records.lever import Candidate, Refusal
from flatout.core.records.memory import Memory, MemoryPart
from flatout.tune.levers.memory.offload_optimizer import LEVER, edit


def run(device: str = "cuda:0", phase: str = "backward") -> Evidence:
    builder = EvidenceBuilder(device_s=0.08)
    builder.optimizer()
    state = MemoryPart(kind="optimizer state", bytes=1 << 30, num_tensors=2)
    memory = Memory(device=device, peak_bytes=4 << 30, peak_phase=phase, at_peak=(state,))
    return msgspec.structs.replace(builder.build(), memory=(memory,))


def test_state_on_a_device_can_leave_it_at_a_price() -> None:
    [candidate] = LEVER.propose(run(), ())
    assert isinstance(candidate, Candidate)
    assert candidate.saved_bytes == 1 << 30
    assert candidate.saved_s[0] < candidate.saved_s[1] < 0


@pytest.mark.parametrize(("evidence", "why"), [(run("cpu"), "device"), (run(phase="optimizer"), "'optimizer'")])
def test_where_nothing_would_be_gained_it_says_why(evidence: Evidence, why: str) -> None:
    [refusal] = LEVER.propose(evidence, ())
    assert isinstance(refusal, Refusal)
    assert why in refusal.because


def test_updates_are_the_same_and_afterwards_nothing_is_left() -> None:
    def trained() -> tuple[nn.Linear, torch.optim.Optimizer]:
        torch.manual_seed(0)
        net = nn.Linear(3, 2)
        optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            net(torch.rand(4, 3)).square().sum().backward()
            optimizer.step()
        return net, optimizer

    expected, _ = trained()
    with pulled(LEVER) as hooks:
        found, optimizer = trained()
        assert hooks.done == [LEVER.id]
        assert optimizer._optimizer_step_post_hooks
    assert not optimizer._optimizer_step_post_hooks
    assert torch.equal(found.weight, expected.weight)


def test_a_line_is_put_below_the_optimizer() -> None:
    made = "optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)\n"
    scheduled = "scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)\n"
    changed = edit(f"import torch\n\n{made}{scheduled}", {})
    assert f"{made}offload_state(optimizer)\n{scheduled}" in changed
    assert "from flatout import offload_state" in changed


def test_other_optimizers_are_left() -> None:
    with pytest.raises(EditError, match="no optimizers"):
        edit("optimizer = make(net)\n", {})
