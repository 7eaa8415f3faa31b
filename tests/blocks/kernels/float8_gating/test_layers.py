"""Gated MLPs among the modules of models: which are run as one, that they compute the same, and that it is undone."""

from __future__ import annotations

import copy
import functools
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.functional import silu

from flatout.blocks.kernels.float8_gating.layers import GatedNames, gated_names, run_gated_as_one
from flatout.blocks.training import float8


class Gated(nn.Module):
    def __init__(self, *, bias: bool = False) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(32, 64, bias=bias) for _ in range(2))
        self.w2 = nn.Linear(64, 32, bias=bias)
        self.act_fn: nn.Module = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.w2(F.silu(self.w1(x)) * self.w3(x))
        return y


class Named(Gated):
    def forward(self, hidden_state):  # type: ignore[no-untyped-def]
        down_proj = self.w2(self.act_fn(self.w1(hidden_state)) * self.w3(hidden_state))
        return down_proj


class ByModule(Gated):
    def forward(self, x: Tensor) -> Tensor:
        return self.w2(torch.nn.functional.silu(self.w1(x)) * self.w3(x))  # type: ignore[no-any-return]


class WithDropout(Gated):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.w2(F.silu(self.w1(x)) * self.w3(x)))


class OtherActivation(Gated):
    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.gelu(self.w1(x)) * self.w3(x))  # type: ignore[no-any-return]


class Sum(Gated):
    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) + self.w3(x))  # type: ignore[no-any-return]


class Shifted(Gated):
    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x + 1))  # type: ignore[no-any-return]


class OneLayerTwice(Gated):
    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w1(x))  # type: ignore[no-any-return]


class Counting(Gated):
    num_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls = self.num_calls + 1
        return self.w2(F.silu(self.w1(x)) * self.w3(x))  # type: ignore[no-any-return]


class Branching(Gated):
    def forward(self, x: Tensor) -> Tensor:
        if x.dim() == 2:
            x = x[None]
        return self.w2(F.silu(self.w1(x)) * self.w3(x))  # type: ignore[no-any-return]


class Assigned(Gated):
    """The name of the argument is assigned anew: what the layers see is not it."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + 1
        return self.w2(F.silu(self.w1(x)) * self.w3(x))  # type: ignore[no-any-return]


class Aside(Gated):
    """It does something beside what it returns."""

    def forward(self, x: Tensor) -> Tensor:
        aside = self.act_fn(x)  # noqa: F841
        return self.w2(F.silu(self.w1(x)) * self.w3(x))  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", [Gated, Named, ByModule])
def test_a_gated_mlp_is_known_by_its_forward(kind: type[Gated]) -> None:
    assert gated_names(kind()) == GatedNames("w1", "w3", "w2")


def test_steps_with_names_and_factors_in_another_order_are_followed() -> None:
    class Steps(Gated):
        def forward(self, hidden: Tensor) -> Tensor:
            """As it is written where each step has a name."""
            gate = self.w1(hidden)
            up = self.w3(hidden)
            product = up * silu(gate)
            down = self.w2(product)
            return down  # type: ignore[no-any-return]

    assert gated_names(Steps()) == GatedNames("w1", "w3", "w2")


@pytest.mark.parametrize(
    "kind",
    [WithDropout, OtherActivation, Sum, Shifted, OneLayerTwice, Counting, Branching, Assigned, Aside],
)
def test_a_forward_that_does_other_or_more_is_not(kind: type[Gated]) -> None:
    assert gated_names(kind()) is None


def test_another_activation_in_a_child_hooks_and_a_forward_of_its_own_are_seen() -> None:
    other, hooked, own = Named(), Gated(), Gated()
    other.act_fn = nn.GELU()
    hooked.register_forward_hook(lambda module, args, output: None)
    own.forward = lambda x: x  # type: ignore[method-assign]
    assert [gated_names(module) for module in (other, hooked, own)] == [None] * 3


def test_a_forward_that_was_wrapped_is_not_known_by_what_it_wraps(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Gated.forward

    @functools.wraps(plain)
    def doubled(self: Gated, x: Tensor) -> Tensor:
        return 2 * plain(self, x)

    monkeypatch.setattr(Gated, "forward", doubled)
    assert gated_names(Gated()) is None


def test_the_mlp_of_transformers_is_known() -> None:
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    config = pytest.importorskip("transformers").LlamaConfig(hidden_size=32, intermediate_size=64)
    assert gated_names(llama.LlamaMLP(config)) == GatedNames("gate_proj", "up_proj", "down_proj")


@pytest.fixture
def as_if(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if this device multiplied float8: converting needs no product, and torchao's has one for CPUs."""
    pytest.importorskip("torchao", reason="torchao is not installed")
    monkeypatch.setattr(float8, "refusal", lambda _: None)


class Net(nn.Module):
    def __init__(self, kind: type[Gated] = Named) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([kind() for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def numbers(net: nn.Module, x: Tensor) -> list[Tensor]:
    y: Tensor = net(x)
    return [
        y.detach(),
        *torch.autograd.grad(y, [*net.parameters()], torch.sin(torch.arange(y.numel())).view_as(y).to(y)),
    ]


def _error(got: Tensor, wanted: Tensor) -> float:
    return float((got.double() - wanted.double()).norm() / wanted.double().norm())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.usefixtures("as_if")
def test_they_compute_what_torchaos_layers_compute_and_are_put_back() -> None:
    torch.manual_seed(0)
    net, x = Net().bfloat16(), torch.randn(2, 16, 32).bfloat16()
    plain = numbers(copy.deepcopy(net).double(), x.double())
    float8.convert(net, sizes="any")
    before = numbers(net, x)
    parameters, names = dict(net.named_parameters()), [*net.state_dict()]
    found = run_gated_as_one(net)
    assert found.paths == ("blocks.0", "blocks.1")
    assert all(p is parameters[name] for name, p in net.named_parameters()) and [*net.state_dict()] == names
    for a, b, exact in zip(numbers(net, x), before, plain, strict=True):
        assert a.dtype == b.dtype
        assert 0 < _error(a, exact) < 1.1 * _error(b, exact)
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
    for a, b in zip(numbers(compiled, x), numbers(net, x), strict=True):  # type: ignore[arg-type]
        torch.testing.assert_close(a, b)
    for same in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert all(torch.equal(a, b) for a, b in zip(numbers(same, x), before, strict=True))
    found.undo()
    assert all(torch.equal(a, b) for a, b in zip(numbers(net, x), before, strict=True))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.usefixtures("as_if")
def test_under_autocast_results_leave_in_its_dtype() -> None:
    net, x = Net(Gated), torch.randn(2, 16, 32)
    float8.convert(net, sizes="any")
    run_gated_as_one(net)
    with torch.autocast("cpu", torch.bfloat16):
        assert net.blocks[0](x).dtype == torch.bfloat16


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.usefixtures("as_if")
def test_what_the_units_do_not_take_runs_layer_by_layer_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    net, wide, odd = Net().bfloat16(), torch.randn(2, 16, 32), torch.randn(1, 24, 32).bfloat16()
    float8.convert(net, sizes="any")
    torch.manual_seed(0)
    block = net.blocks[0]
    before = block(odd[:, :16])
    run_gated_as_one(net)
    monkeypatch.setattr("flatout.blocks.kernels.float8_gating.layers.float8_gated_mlp", lambda *_: "as one")
    assert block(odd[:, :16]) == "as one" and before.shape == (1, 16, 32)
    assert block(odd).shape == odd.shape  # 24 rows
    assert copy.deepcopy(block).float()(wide).shape == wide.shape == block.float()(wide).shape


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.usefixtures("as_if")
def test_layers_in_another_precision_with_biases_or_other_scales_are_left() -> None:
    plain = Net()
    assert run_gated_as_one(plain).paths == ()
    partly = Net()
    float8.convert(partly, sizes="any", skip=("blocks.0.w2",))
    assert run_gated_as_one(partly).paths == ("blocks.1",)
    biased, by_row = nn.ModuleList([Gated(bias=True)]), Net()
    float8.convert(biased, sizes="any")
    float8.convert(by_row, sizes="any", recipe="rowwise")
    assert run_gated_as_one(biased).paths == run_gated_as_one(by_row).paths == ()
