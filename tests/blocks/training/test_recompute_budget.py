"""A budget for what is kept for the backward: counted anew while the model trains under it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from flatout.blocks.training.recompute import (
    Recomputed,
    SavedStorage,
    _peak,
    _saved_bytes,
    _select,
    recompute_within,
)
from flatout.core.errors import UsageError


class _Net(nn.Module):
    """Blocks of two kinds, and running statistics that must not count twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 32)
        layer = {"nhead": 2, "dim_feedforward": 128, "dropout": 0.1, "batch_first": True}
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(32, **layer) for _ in range(4))  # type: ignore[arg-type]
        self.mlps = nn.ModuleList(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(3))
        self.norm = nn.BatchNorm1d(32)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in (*self.layers, *self.mlps):
            x = block(x)
        return self.norm(x.flatten(0, 1)).square().mean()  # type: ignore[no-any-return]


def _step(net: nn.Module) -> Tensor:
    return net(torch.arange(8 * 20 * 16.0).view(8, 20, 16).sin())  # type: ignore[no-any-return]


def _kept_now(net: nn.Module) -> int:
    """Bytes that are alive for the backward, by another way: tensors the graph and the checkpoints hold."""
    own = {t.untyped_storage().data_ptr() for t in [*net.parameters(), *net.buffers()]}
    seen: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        seen[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    inputs: list[Any] = []
    hooks = [
        m.register_forward_pre_hook(lambda m, args: inputs.append(args[0]))
        for m in net.modules()
        if "forward" in vars(m)
    ]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        loss = _step(net)
    for hook in hooks:
        hook.remove()
    seen |= {t.untyped_storage().data_ptr(): t for t in inputs}
    del loss
    return sum(t.untyped_storage().nbytes() for place, t in seen.items() if place not in own)


def _trained(net: _Net) -> list[Tensor]:
    torch.manual_seed(1)
    net.zero_grad()
    _step(net).backward()
    return [*(p.grad for p in net.parameters() if p.grad is not None), net.norm.running_mean.clone(), torch.rand(3)]  # type: ignore[union-attr,operator]


@pytest.mark.slow
@pytest.mark.parametrize("share", [1.0, 0.8, 0.5, 0.35])
def test_what_is_kept_stays_within_and_the_training_is_the_same(share: float) -> None:
    torch.manual_seed(0)
    expected = _trained(_Net())
    torch.manual_seed(0)
    net = _Net()
    state = torch.get_rng_state()
    everything = recompute_within(net, 1 << 60, lambda: _step(net))
    assert torch.equal(torch.get_rng_state(), state)
    assert everything.paths == ()
    assert everything.saved_bytes == everything.now_bytes == _kept_now(net)
    torch.set_rng_state(state)
    budget = int(share * everything.saved_bytes)
    for module in net.modules():  # the count above has moved the running statistics
        if isinstance(module, nn.BatchNorm1d):
            module.reset_running_stats()
    found = recompute_within(net, budget, lambda: _step(net))
    assert found.now_bytes <= budget
    assert bool(found.paths) == (share < 1)
    assert all(map(torch.equal, _trained(net), expected))
    assert _kept_now(net) <= found.now_bytes
    found.undo()
    assert _kept_now(net) == everything.saved_bytes


def test_a_budget_that_cannot_be_kept_is_refused_with_what_can() -> None:
    net = _Net()
    with pytest.raises(
        UsageError, match=r"1000 bytes are not enough: of .* are left when [0-9] of 7 blocks are recomputed"
    ):
        recompute_within(net, 1000, lambda: _step(net))
    assert not any("forward" in vars(m) for m in net.modules())


def test_running_statistics_and_global_state_are_as_they_were() -> None:
    net = _Net()
    before = {n: b.clone() for n, b in net.named_buffers()}
    found: Recomputed = recompute_within(net, 1 << 60, lambda: _step(net))
    found.undo()
    assert all(torch.equal(b, before[n]) for n, b in net.named_buffers())
    assert all(p.grad is None for p in net.parameters())


STORAGES = st.lists(
    st.builds(
        SavedStorage,
        st.integers(1, 100),
        st.frozensets(st.integers(-1, 5), min_size=1, max_size=2),
        st.frozensets(st.integers(0, 5), max_size=1),
    ),
    max_size=20,
)


@pytest.mark.slow
@given(STORAGES, st.lists(st.floats(0.01, 1.0), min_size=6, max_size=6), st.integers(0, 1000))
def test_a_choice_fits_or_is_the_least_that_was_found(
    storages: list[SavedStorage], seconds: list[float], budget: int
) -> None:
    chosen = _select(storages, seconds, budget)
    nothing, everything = _peak(storages, frozenset()), _peak(storages, frozenset(range(6)))
    assert _saved_bytes(storages, chosen) <= _peak(storages, chosen) <= max(budget, min(nothing, everything))
    if nothing <= budget:
        assert chosen == frozenset()
