from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from flatout.blocks.training.recompute import blocks_of, recompute


class Block(nn.Module):
    def __init__(self, width: int, *, norm: bool = False) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Dropout(0.3))
        self.norm = nn.BatchNorm1d(width) if norm else nn.LayerNorm(width)
        self.num_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        return self.norm(x + self.body(x))  # type: ignore[no-any-return]


class Net(nn.Module):
    def __init__(self, *, norm: bool = False) -> None:
        super().__init__()
        self.head = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        self.blocks = nn.ModuleList(Block(8, norm=norm) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()

    def counts(self) -> list[int]:
        return [b.num_calls for b in self.blocks]  # type: ignore[misc]


def trained(net: Net) -> list[Tensor]:
    torch.manual_seed(1)
    loss = net(torch.rand(16, 8))
    loss.backward()
    return [loss.detach(), *(p.grad for p in net.blocks.parameters() if p.grad is not None), torch.rand(3)]


@pytest.mark.parametrize(("fraction", "calls"), [(1.0, [2, 2, 2, 2]), (0.5, [2, 2, 1, 1]), (0.0, [1, 1, 1, 1])])
def test_gradients_masks_and_random_numbers_are_the_same(fraction: float, calls: list[int]) -> None:
    torch.manual_seed(0)
    expected = trained(Net())
    torch.manual_seed(0)
    net = Net()
    paths, undo = recompute(net, fraction=fraction)
    found = trained(net)
    assert len(paths) == sum(c > 1 for c in calls)
    assert net.counts() == calls
    assert all(map(torch.equal, found, expected))
    undo()
    assert not any("forward" in vars(b) for b in net.blocks)


def test_a_model_that_is_not_trained_computes_once() -> None:
    net = Net().eval()
    recompute(net)
    net(torch.rand(2, 8)).backward()
    assert net.counts() == [1, 1, 1, 1]


def test_blocks_that_count_what_they_see_are_left_out() -> None:
    net = Net(norm=True)
    assert len(blocks_of(net)) == 4
    assert recompute(net)[0] == ()


def test_only_the_named_container_counts() -> None:
    assert [path for path, _ in blocks_of(Net(), "blocks")] == [f"blocks.{i}" for i in range(4)]
    assert blocks_of(Net(), "head") == []


def test_a_fraction_is_one() -> None:
    with pytest.raises(ValueError, match="fraction"):
        recompute(Net(), fraction=2)
