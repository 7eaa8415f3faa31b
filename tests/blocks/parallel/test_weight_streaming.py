"""Streamed weights: results and gradients bitwise those of the plain model, few blocks on the device at once, put back."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from flatout.blocks.parallel.experts import Experts, auxiliary_loss
from flatout.blocks.parallel.weight_streaming import Streamed, stream_weights
from flatout.blocks.training.recompute import recompute_blocks
from flatout.core.errors import UsageError

NUM_BLOCKS = 5


class _Seen:
    """Memory of weights that blocks computed with: how many blocks' is alive at once, forward and backward."""

    def __init__(self) -> None:
        self.refs: list[tuple[int, Any]] = []
        self.peak = 0

    def look(self) -> None:
        self.peak = max(self.peak, len({block for block, ref in self.refs if not ref.expired()}))


class _Looked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seen: _Seen) -> Tensor:
        ctx.seen = seen
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.seen.look()
        return grad.clone(), None


class _TransformerBlock(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)
        self.scale = nn.Parameter(torch.ones(8))
        self.drop = nn.Dropout(0.1)
        self.seen: _Seen | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.seen is None:
            return x + self.down(self.drop(self.up(self.norm(x)).relu())) * self.scale
        weights = (self.norm.weight, self.up.weight, self.down.weight, self.scale)
        self.seen.refs += [(self.number, StorageWeakRef(w.untyped_storage())) for w in weights]
        self.seen.look()
        inner = _Looked.apply(x, self.seen)
        return x + _Looked.apply(self.down(self.drop(self.up(self.norm(inner)).relu())) * self.scale, self.seen)


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 2)
        self.blocks = nn.ModuleList(_TransformerBlock(number) for number in range(NUM_BLOCKS))
        self.call: Callable[[nn.Module, Tensor], Tensor] = lambda block, x: block(x)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = self.call(block, x)
        return self.last(x)


def _pair() -> tuple[_Net, _Net]:
    torch.manual_seed(0)
    net = _Net()
    return net, copy.deepcopy(net)


def _trained(net: _Net) -> Iterator[list[Tensor]]:
    """Two micro-batches a step; yields loss and gradients of each."""
    update = torch.optim.AdamW(net.parameters(), lr=1e-2)
    for step in range(3):
        for micro in range(2):
            torch.manual_seed(2 * step + micro)
            loss = net(torch.randn(5, 4, dtype=net.first.weight.dtype)).square().sum()
            loss.backward()
            yield [loss.detach(), *(p.grad.clone() for p in net.parameters() if p.grad is not None)]
        update.step()
        update.zero_grad()


def _reentrant(block: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(block, x, use_reentrant=True)


def _recomputed(block: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(block, x, use_reentrant=False)


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [0, 1, 2, 9])
@pytest.mark.parametrize("recompute", ["none", "before", "after", "called", "reentrant"])
def test_training_is_bitwise_that_of_the_plain_model_and_few_blocks_live(recompute: str, ahead: int) -> None:
    plain, net = _pair()
    if recompute == "before":
        recompute_blocks([*net.blocks])
    streamed = stream_weights(net.blocks, "cpu", ahead=ahead)
    if recompute == "after":
        recompute_blocks([*net.blocks])
    if recompute in ("called", "reentrant"):
        net.call = _reentrant if recompute == "reentrant" else _recomputed
    seen = _Seen()
    for block in net.blocks:
        assert isinstance(block, _TransformerBlock)
        block.seen = seen
    for wanted, found in zip(_trained(plain), _trained(net), strict=True):
        assert len(wanted) == len(found)
        assert all(map(torch.equal, wanted, found))
        assert streamed.num_live == 0
    assert streamed.peak_blocks == min(ahead + 1, NUM_BLOCKS)
    assert 1 <= seen.peak <= ahead + 1
    seen.peak = 0
    seen.look()
    assert seen.peak == 0  # nothing is left on the device
    assert all(map(torch.equal, plain.state_dict().values(), net.state_dict().values()))


def test_weights_come_once_in_a_forward_and_once_in_its_backward_but_for_the_last() -> None:
    _, net = _pair()
    streamed = stream_weights(net.blocks, "cpu", ahead=1)
    a_block = sum(p.nbytes for p in net.blocks[0].parameters())
    net(torch.randn(3, 4)).sum().backward()
    assert streamed.bytes_in == (2 * NUM_BLOCKS - 1) * a_block  # what the forward ends with, the backward begins with
    with torch.no_grad():
        net(torch.randn(3, 4))
    assert streamed.bytes_in == (3 * NUM_BLOCKS - 1) * a_block


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_inference_gives_the_same_and_sees_weights_that_changed_between(mode: Callable[[], Any]) -> None:
    plain, net = _pair()
    plain.eval(), net.eval()
    stream_weights(net.blocks, "cpu", ahead=NUM_BLOCKS)
    x = torch.randn(3, 4)
    for _ in range(2):
        with mode():
            assert torch.equal(plain(x), net(x))
        for p in [*plain.parameters(), *net.parameters()]:
            p.data.mul_(1.5)  # tells no version
    plain(x).sum().backward()
    net(x).sum().backward()
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(plain.parameters(), net.parameters(), strict=True))


def test_between_calls_the_model_has_its_own_parameters_on_the_host() -> None:
    _, net = _pair()
    before, names = [*net.parameters()], [*net.state_dict()]
    with stream_weights(net.blocks, "cpu"):
        net(torch.randn(3, 4)).sum().backward()
        assert all(p is q for p, q in zip(before, net.parameters(), strict=True))
        assert [*net.state_dict()] == names
        with pytest.raises(RuntimeError, match="shape"):
            net(torch.randn(3, 5))
        assert all(p is q for p, q in zip(before, net.parameters(), strict=True))


def test_undo_puts_back_what_was_there() -> None:
    plain, net = _pair()
    undo = recompute_blocks([net.blocks[0]])
    held = vars(net.blocks[0])["forward"]
    streamed = stream_weights(net.blocks, "cpu")
    pointers = [p.data_ptr() for p in net.parameters()]
    net(torch.randn(3, 4))  # no backward follows
    streamed.undo()
    streamed.undo()
    assert vars(net.blocks[0])["forward"] is held
    assert all("forward" not in vars(block) for block in net.blocks[1:])
    assert pointers == [p.data_ptr() for p in net.parameters()]
    undo()
    for wanted, found in zip(_trained(plain), _trained(net), strict=True):
        assert all(map(torch.equal, wanted, found))


def test_a_backward_after_undo_is_refused() -> None:
    _, net = _pair()
    streamed = stream_weights(net.blocks, "cpu")
    loss = net(torch.randn(3, 4)).sum()
    streamed.undo()
    with pytest.raises(UsageError, match="undo after the backward"):
        loss.backward()


def test_tied_and_frozen_weights_and_blocks_called_twice() -> None:
    plain, net = _pair()
    for one in (plain, net):
        one.blocks[2].up.weight = one.blocks[0].up.weight
        one.blocks[1].down.weight.requires_grad_(False)
        for p in one.blocks[3].parameters():
            p.requires_grad_(False)
        one.call = lambda block, x: block(block(x))
        one.double()  # sums are in another order
    stream_weights(net.blocks, "cpu")
    for wanted, found in zip(_trained(plain), _trained(net), strict=True):
        for a, b in zip(wanted, found, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_a_loss_from_within_a_block_finds_its_weights() -> None:
    def net() -> nn.ModuleList:
        torch.manual_seed(0)
        return nn.ModuleList(Experts(8, 16, 4, 2, has_auxiliary_loss=True) for _ in range(4))

    grads = []
    for blocks in (net(), net()):
        if grads:
            streamed = stream_weights(blocks, "cpu", ahead=0)
        x = torch.linspace(-1, 1, 48).view(6, 8)
        for block in blocks:
            x = x + block(x)
        (x.square().sum() + auxiliary_loss(blocks)).backward()
        grads.append([p.grad for p in blocks.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
    assert streamed.peak_blocks == 1


def test_weights_changed_before_the_backward_are_told() -> None:
    _, net = _pair()
    stream_weights(net.blocks, "cpu")
    loss = net(torch.randn(3, 4)).sum()
    with torch.no_grad():
        net.blocks[1].up.weight.add_(1)
    with pytest.raises(RuntimeError, match=r"block 1, of shape \[16, 8\], was changed after the forward"):
        loss.backward()
    net.zero_grad()
    net(torch.randn(3, 4)).sum().backward()  # and the next step is none the worse


def test_activations_changed_in_place_are_told_as_ever() -> None:
    class Wrong(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(x).exp()
            y.add_(1)
            return y

    block = Wrong()
    stream_weights([block], "cpu")
    with pytest.raises(RuntimeError, match="changed in place"):
        block(torch.randn(2, 3)).sum().backward()


def test_hooks_around_a_block_have_its_activations_and_no_weights() -> None:
    _, net = _pair()
    shapes: list[tuple[int, ...]] = []
    stream_weights(net.blocks, "cpu")

    def pack(tensor: Tensor) -> Tensor:
        shapes.append(tuple(tensor.shape))
        return tensor

    x = torch.randn(3, 8, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = net.blocks[0](x)
    y.sum().backward()
    assert (3, 16) in shapes
    assert not {(16, 8), (8, 16), (8,)} & {*shapes}


def test_second_derivatives_are_refused() -> None:
    _, net = _pair()
    stream_weights(net.blocks, "cpu")
    x = torch.randn(3, 4, requires_grad=True)
    with pytest.raises(UsageError, match="second derivatives"):
        torch.autograd.grad(net(x).sum(), x, create_graph=True)


def test_what_cannot_be_streamed_is_refused() -> None:
    linear = nn.Linear(2, 2)
    for blocks, why in (
        ([], "0 blocks"),
        ([nn.ReLU()], "has no parameters"),
        ([nn.LSTM(2, 2)], "list of its own"),
        ([linear, nn.Sequential(linear)], "'0' is in block 0 too"),
        ([nn.Linear(2, 2, device="meta")], "meta"),
    ):
        with pytest.raises(UsageError, match=why):
            stream_weights(blocks, "cpu")
    with pytest.raises(UsageError, match="ahead -1"):
        stream_weights([linear], "cpu", ahead=-1)
    with pytest.raises(UsageError, match="device 'meta'"):
        stream_weights([linear], "meta")
    stream_weights([linear], "cpu")
    with pytest.raises(UsageError, match="streamed already"):
        stream_weights([linear], "cpu")


@pytest.mark.device
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("recompute", ["none", "before", "after"])
def test_on_a_gpu_it_is_bitwise_the_same_and_memory_is_bounded(recompute: str) -> None:
    width, num = 2048, 8

    def net() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(num)))

    plain, other = net().cuda(), net()
    if recompute == "before":
        recompute_blocks([*other])
    streamed: Streamed = stream_weights([*other], "cuda")
    if recompute == "after":
        recompute_blocks([*other])
    for step in range(4):
        x = torch.randn(64, width, device="cuda", generator=torch.Generator("cuda").manual_seed(step))
        for one in (plain, other):
            one(x).square().mean().backward()
        with torch.no_grad():
            for p, q in zip(plain.parameters(), other.parameters(), strict=True):
                assert torch.equal(p.grad.cpu(), q.grad)
                if step % 2:  # a host's update would round otherwise
                    p.mul_(0.9)
                    q.copy_(p)
                    p.grad = q.grad = None
    del plain
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    other(x).square().mean().backward()
    a_block = 4 * (width * width + width)
    assert (
        torch.cuda.max_memory_allocated() - before < 5.5 * a_block
    )  # two of weights, two of gradients, one that is made
    assert streamed.peak_blocks == 2
    assert all(p.is_pinned() and p.grad is not None and not p.grad.is_cuda for p in other.parameters())
    streamed.undo()
    assert not any(p.is_pinned() for p in other.parameters())
