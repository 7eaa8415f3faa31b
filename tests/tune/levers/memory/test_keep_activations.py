from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.evidence_builder import EvidenceBuilder
from tests.lever_tools import edited, found, pulled
from torch import Tensor, nn
from torch.utils import checkpoint as checkpoints

from flatout.core.errors import EditError
from flatout.core.records.lever import Candidate, Refusal
from flatout.tune.levers.memory.keep_activations import LEVER


class Net(nn.Module):
    """Two blocks with dropout and batch norm, both recomputed."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.first, self.options = nn.Linear(6, 8), options
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Tanh()) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoints.checkpoint(block, x, **self.options)
        return x.square().mean()


def trained(net: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Loss, gradients and buffers after one step in training."""
    torch.manual_seed(1)
    loss = net(x)
    loss.backward()
    gradients = {n: p.grad.clone() for n, p in net.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **gradients, **{n: b.clone() for n, b in net.named_buffers()}}


def test_it_is_offered_where_the_memory_would_hold_them() -> None:
    run = EvidenceBuilder().build()
    [refusal] = LEVER.propose(run, ())
    assert isinstance(refusal, Refusal)
    [candidate] = LEVER.propose(run, [found(0.01)])
    assert isinstance(candidate, Candidate)


@pytest.mark.parametrize("is_reentrant", [True, False])
def test_the_same_is_learnt_and_each_block_runs_once(is_reentrant: bool) -> None:
    torch.manual_seed(0)
    net, x = Net(use_reentrant=is_reentrant), torch.randn(16, 6)
    state = {n: t.clone() for n, t in net.state_dict().items()}
    calls: list[int] = []
    net.blocks[0].register_forward_pre_hook(lambda *_: calls.append(1))
    before, num_before = trained(net, x), len(calls)
    net.load_state_dict(state)
    net.zero_grad()
    with pulled(LEVER) as hooks:
        after = trained(net, x)
        assert hooks.done == [LEVER.id]
    assert (num_before, len(calls) - num_before) == (2, 1)
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        torch.testing.assert_close(after[name], tensor, msg=name, rtol=1e-6, atol=1e-7)
    assert int(after["blocks.0.1.num_batches_tracked"]) == 2


def test_what_gets_no_gradient_gets_none() -> None:
    """A reentrant call whose inputs have none leaves its parameters without; they would get one directly."""
    block = nn.Linear(4, 4)
    with pulled(LEVER):
        assert not checkpoints.checkpoint(block, torch.randn(2, 4), use_reentrant=True).requires_grad
        assert checkpoints.checkpoint(block, torch.randn(2, 4), use_reentrant=False).requires_grad


def test_batch_norms_elsewhere_and_in_evaluation_count_as_ever() -> None:
    norm = nn.BatchNorm1d(4)
    with pulled(LEVER):
        norm(torch.randn(8, 4))
        assert int(norm.num_batches_tracked or 0) == 1
        with torch.no_grad():
            checkpoints.checkpoint(norm, torch.randn(8, 4), use_reentrant=False)
        assert int(norm.num_batches_tracked or 0) == 2
    assert "checkpoint" in str(checkpoints.checkpoint.__module__)


def test_edited_the_function_is_called_directly() -> None:
    text = """
        from torch.utils.checkpoint import checkpoint
        y = checkpoint(block, x, mask, use_reentrant=False)
        z = checkpoint(lambda t: t * 2, y, preserve_rng_state=False, use_reentrant=False)
    """
    after = edited(LEVER, text)
    assert "y = block(x, mask)" in after and "z = (lambda t: t * 2)(y)" in after
    with pytest.raises(EditError, match="does not call"):
        edited(LEVER, "y = block(x)\n")
    with pytest.raises(EditError, match="batch norms"):
        edited(
            LEVER, "from torch.utils.checkpoint import checkpoint\nnorm = nn.BatchNorm1d(4)\ny = checkpoint(norm, x)\n"
        )
