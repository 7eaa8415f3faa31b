"""Frozen weights of linear layers in 16 bits: the bits of autocast, half the memory, and what is refused."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import Tensor, nn

import flatout
from flatout.blocks.training.frozen_weights import FrozenLinear
from flatout.core.errors import UsageError


class WithAdapter(nn.Module):
    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer
        self.down, self.up = nn.Linear(layer.in_features, 2, bias=False), nn.Linear(2, layer.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.up(self.down(x))


class Net(nn.Module):
    """Frozen layers with adapters, a head that is trained, and a head that shares its weight with the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 32)
        self.wide = WithAdapter(nn.Linear(32, 64))
        self.narrow = WithAdapter(nn.Linear(64, 32, bias=False))
        self.norm = nn.LayerNorm(32)
        self.tied = nn.Linear(32, 20, bias=False)
        self.tied.weight = self.embedding.weight
        self.head = nn.Linear(32, 4)
        for layer in (self.wide.layer, self.narrow.layer, self.embedding, self.norm):
            layer.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        x = self.norm(x + self.narrow(torch.relu(self.wide(x))))
        return torch.cat([self.tied(x), self.head(x)], dim=-1)


def net_and_tokens() -> tuple[Net, Tensor]:
    torch.manual_seed(0)
    return Net(), torch.randint(20, (6, 5))


def losses_and_gradients(net: nn.Module, tokens: Tensor, *, compiled: bool) -> list[Tensor]:
    call = torch.compile(net, backend="aot_eager", fullgraph=True) if compiled else net
    with torch.autocast("cpu", torch.bfloat16):
        out = call(tokens)
    out.float().square().mean().backward()
    found = [out.detach(), *(p.grad for p in net.parameters() if p.grad is not None)]
    net.zero_grad()
    return found


@pytest.mark.parametrize("compiled", [False, True])
def test_under_autocast_results_and_gradients_have_the_same_bits(compiled: bool) -> None:
    net, tokens = net_and_tokens()
    plain = losses_and_gradients(copy.deepcopy(net), tokens, compiled=compiled)

    flatout.hold_frozen_weights(net)

    found = losses_and_gradients(net, tokens, compiled=compiled)
    assert len(found) == len(plain) == 7
    assert all(torch.equal(one, other) for one, other in zip(found, plain, strict=True))


def test_only_frozen_layers_that_share_nothing_lie_in_16_bits() -> None:
    net, _ = net_and_tokens()

    flatout.hold_frozen_weights(net, torch.float16)

    halves = {name for name, p in net.named_parameters() if p.dtype == torch.float16}
    assert halves == {"wide.layer.weight", "wide.layer.bias", "narrow.layer.weight"}
    assert [type(m) for m in (net.wide.layer, net.tied, net.head)] == [FrozenLinear, nn.Linear, nn.Linear]


def test_the_state_dict_is_in_float32_and_can_be_loaded_by_both() -> None:
    net, tokens = net_and_tokens()
    before = copy.deepcopy(net)
    undo = flatout.hold_frozen_weights(net)
    saved = net.state_dict()

    assert {t.dtype for t in saved.values()} == {torch.float32}
    assert list(saved) == list(before.state_dict())
    torch.testing.assert_close(saved["wide.layer.weight"], before.wide.layer.weight, rtol=2**-8, atol=0)
    before.load_state_dict(saved)
    net.load_state_dict(before.state_dict())
    assert net.wide.layer.weight.dtype == torch.bfloat16
    undo()
    assert type(net.wide.layer) is nn.Linear and net.wide.layer.weight.dtype == torch.float32
    torch.testing.assert_close(net(tokens), before(tokens))


def test_without_autocast_inputs_keep_their_dtype() -> None:
    net, tokens = net_and_tokens()
    expected = net(tokens)

    flatout.hold_frozen_weights(net)

    found = net(tokens)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=0, atol=2**-5)


def test_low_rank_adapters_are_added_to_such_weights() -> None:
    net, _ = net_and_tokens()
    wide, x = net.wide, torch.randn(64, 32)
    with torch.autocast("cpu", torch.bfloat16):
        expected = flatout.lora_linear(x, wide.layer, wide.down, wide.up)

    flatout.hold_frozen_weights(net)

    with torch.autocast("cpu", torch.bfloat16):
        found = flatout.lora_linear(x, wide.layer, wide.down, wide.up)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, expected, rtol=2**-6, atol=2**-6)
    assert flatout.lora_linear(x, wide.layer, wide.down, wide.up).dtype == torch.float32


@pytest.mark.parametrize(
    "compiled",
    [
        False,
        pytest.param(
            True,
            marks=pytest.mark.skipif(
                tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13),
                reason="compiled code of torch 2.11 does not see that a weight is trained, of any layer",
            ),
        ),
    ],
)
def test_weights_that_are_trained_later_are_float32_again_before_their_first_gradient(compiled: bool) -> None:
    net, tokens = net_and_tokens()
    flatout.hold_frozen_weights(net)
    call = torch.compile(net, backend="aot_eager") if compiled else net
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-6)
    for is_trained in (False, True):
        net.wide.layer.requires_grad_(is_trained)
        with torch.autocast("cpu", torch.bfloat16), warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            loss = call(tokens).float().square().mean()
        assert any("are trained now" in str(one.message) for one in told) == is_trained
        loss.backward()
        before = net.wide.layer.weight.detach().clone()
        optimizer.step()
        optimizer.zero_grad()
    weight = net.wide.layer.weight
    assert type(net.wide.layer) is nn.Linear and weight.dtype == torch.float32
    assert not torch.equal(weight, before), "an update that 16 bits would have lost"
    assert (weight.bfloat16() == before.bfloat16()).float().mean() > 0.9
    assert type(net.narrow.layer) is FrozenLinear


def test_weights_that_are_no_plain_tensors_stay_as_they_are() -> None:
    class Part(Tensor):
        pass

    layer = nn.Linear(3, 2)
    layer.weight = nn.Parameter(layer.weight.detach().as_subclass(Part), requires_grad=False)
    layer.bias.requires_grad_(False)

    flatout.hold_frozen_weights(layer)

    assert type(layer) is nn.Linear and layer.weight.dtype == torch.float32


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(UsageError, match=r"neither torch\.bfloat16 nor torch\.float16"):
        flatout.hold_frozen_weights(nn.Linear(2, 2), torch.float32)
