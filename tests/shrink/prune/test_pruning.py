"""A pruned model is the original without the removed units: smaller, of the same class, and proved."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tests.plain_models import PLAIN, Plain, plain
from torch import Tensor, nn

from flatout.core.errors import PlanError, UsageError
from flatout.shrink.prune import UnitGroup, apply_pruning, map_state, prune, read_pruning


def narrow(case: Plain, pruned: object) -> tuple[Tensor, ...]:
    first = len(case.inputs) - case.num_state
    return (*case.inputs[:first], *map_state(pruned.plan, case.inputs[first:]))  # type: ignore[attr-defined]


def silence(model: nn.Module, removed: dict[str, tuple[tuple[int, ...] | None, ...]]) -> None:
    """Make the units that will go dead: zero in every slice."""
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    with torch.no_grad():
        for name, remaining in removed.items():
            for dim, own in enumerate(remaining):
                if own is not None:
                    gone = sorted(set(range(tensors[name].shape[dim])) - set(own))
                    tensors[name].index_fill_(dim, torch.tensor(gone), 0.0)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*_flat_weights:UserWarning")  # of any nn.GRU that is exported
@pytest.mark.parametrize("name", PLAIN)
def test_half_of_a_plain_model_goes_and_the_rest_runs_exports_and_compiles(name: str) -> None:
    case = plain(name)
    before = {key: value.clone() for key, value in case.module.state_dict().items()}

    pruned = prune(case.module, case.inputs, num_state=case.num_state)

    report, inputs = pruned.report, narrow(case, pruned)
    assert type(pruned.model) is type(case.module)
    assert report.parameters_fraction <= 0.6
    assert report.num_parameters == sum(p.numel() for p in pruned.model.parameters())
    assert report.error <= 1e-8
    assert all(torch.equal(value, before[key]) for key, value in case.module.state_dict().items())
    expected = pruned.model.eval()(*inputs)
    exported = torch.export.export(pruned.model, inputs).module()
    torch.testing.assert_close(exported(*inputs), expected)
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(pruned.model, backend="eager", fullgraph=name != "gru")(*inputs), expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cnn", "separable", "gru", "gru_step", "lstm_step", "tcn"])
def test_units_that_are_dead_go_without_a_trace(name: str) -> None:
    """Without norms over the units that go, absence and zero are the same."""
    case = plain(name)
    case.module.eval()
    keep = ["norm"] if name == "separable" else []
    plan = prune(case.module, case.inputs, num_state=case.num_state, keep=keep).plan
    silence(case.module, plan.remaining)

    smaller = apply_pruning(case.module, plan)

    first = len(case.inputs) - case.num_state
    found = smaller(*case.inputs[:first], *map_state(plan, case.inputs[first:]))
    expected = case.module(*case.inputs)
    if case.num_state:
        found, expected = found[0], expected[0]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_plan_makes_the_same_model_again(tmp_path: Path) -> None:
    case = plain("transformer")
    pruned = prune(case.module, case.inputs)
    pruned.save(tmp_path / "plan.json")

    again = apply_pruning(case.module, read_pruning(tmp_path / "plan.json"))

    assert torch.equal(again(*case.inputs), pruned.model(*case.inputs))


def test_a_plan_for_another_model_is_refused_by_name(tmp_path: Path) -> None:
    plan = prune(plain("mlp").module, plain("mlp").inputs).plan

    with pytest.raises(PlanError, match=r"'0.weight' is \[32, 64\], the plan was made for \[64, 64\]"):
        apply_pruning(plain("mlp", width=32).module, plan)
    with pytest.raises(PlanError, match="holds no plan of pruning"):
        read_pruning(tmp_path / "nothing.json")


def test_a_rollout_with_the_carried_state_stays_equal() -> None:
    case = plain("lstm_step")
    silenced = copy.deepcopy(case.module)
    pruned = prune(case.module, case.inputs, num_state=4)
    silence(silenced, pruned.plan.remaining)
    states = tuple(torch.zeros(4, 32) for _ in range(4))
    small = pruned.map_state(*states)

    for step in range(5):
        x = torch.randn(4, 16, generator=torch.Generator().manual_seed(step))
        y, *states = silenced(x, *states)
        z, *small = pruned.model(x, *small)

    torch.testing.assert_close(z, y)
    assert pruned.state_shapes == ((4, 16),) * 4
    torch.testing.assert_close(list(pruned.map_state(*states)), small)


class Literal(nn.Module):
    """A width in the code, where no attribute can change it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 32), nn.Linear(32, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.relu(self.b(torch.relu(self.a(x).view(-1, 32)))))


def test_a_width_written_into_the_code_is_pinned_with_its_line_and_the_rest_goes() -> None:
    pruned = prune(Literal(), (torch.randn(4, 8),))

    refused = next(p for p in pruned.report.pinned if p.place == "a")
    assert "test_pruning.py:" in refused.because and "RuntimeError" in refused.because
    assert pruned.model.a.out_features == 32
    assert (pruned.model.b.out_features, pruned.model.c.in_features) == (8, 8)


class Unknown(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.sort(self.a(x), -1).values
        return self.c(torch.relu(self.b(x)))


def test_an_operator_without_a_rule_pins_what_it_touches_and_is_named() -> None:
    pruned = prune(Unknown(), (torch.randn(4, 8),))

    because = {p.place: p.because for p in pruned.report.pinned}
    assert "no rule for sort at test_pruning.py:" in because["a.weight[0]"]
    assert pruned.model.b.out_features == 8


class GruByHand(nn.Module):
    """Gates cut by a width that the module holds."""

    def __init__(self, num: int = 16) -> None:
        super().__init__()
        self.num, self.x, self.h, self.out = num, nn.Linear(8, 3 * num), nn.Linear(num, 3 * num), nn.Linear(num, 2)

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        a, b, n = self.x(x), self.h(h), self.num
        z, r = torch.sigmoid(a[:, :n] + b[:, :n]), torch.sigmoid(a[:, n : 2 * n] + b[:, n : 2 * n])
        h = (1 - z) * torch.tanh(a[:, 2 * n :] + r * b[:, 2 * n :]) + z * h
        return self.out(h), h


def test_numbers_that_the_users_modules_hold_are_set_when_the_proof_holds() -> None:
    pruned = prune(GruByHand(), (torch.randn(4, 8), torch.zeros(4, 16)), num_state=1)

    assert pruned.plan.attributes == {"": {"num": 8}}
    assert pruned.state_shapes == ((4, 8),)


class Ring(nn.Module):
    """A convolution's window as carried state."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.c, self.o = nn.Linear(8, 16), nn.Conv1d(16, 16, 4), nn.Linear(16, 2)

    def forward(self, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        w = torch.cat((w[:, :, 1:], F.relu(self.a(x)).unsqueeze(2)), 2)
        return self.o(self.c(w)[:, :, 0]), w


def test_a_window_that_is_carried_loses_channels_but_no_time() -> None:
    pruned = prune(Ring(), (torch.randn(4, 8), torch.zeros(4, 16, 4)), num_state=1)

    assert pruned.state_shapes == ((4, 8, 4),)


def test_tied_weights_stay_one_tensor() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.inner, self.head = nn.Embedding(50, 16), nn.Linear(16, 16), nn.Linear(16, 50, bias=False)
            self.head.weight = self.words.weight

        def forward(self, ids: Tensor) -> Tensor:
            x = self.words(ids)
            return self.head(x + F.gelu(self.inner(x)))

    pruned = prune(Tied(), (torch.randint(0, 50, (2, 7)),))

    assert pruned.model.head.weight is pruned.model.words.weight
    assert tuple(pruned.model.head.weight.shape) == (50, 8)


def test_a_gradient_step_trains_the_smaller_model() -> None:
    pruned = prune(plain("cnn").module, plain("cnn").inputs)

    pruned.model(*plain("cnn").inputs).sum().backward()

    assert all(p.grad is not None and p.grad.shape == p.shape for p in pruned.model.parameters())


def test_the_least_important_units_go() -> None:
    case = plain("mlp")
    with torch.no_grad():
        case.module[0].weight[:10] = 0
        case.module[0].bias[:10] = 0
        case.module[2].weight[:10] = 0
        case.module[3].weight[:, :10] = 0

    remaining = prune(case.module, case.inputs, fraction={"0": 10 / 64}).plan.remaining["0.weight"][0]

    assert remaining == tuple(range(10, 64))


def test_taylor_keeps_what_the_loss_depends_on() -> None:
    case = plain("mlp")
    x = case.inputs[0]
    with torch.no_grad():
        case.module[5].weight[0, :8] = 1.0
        case.module[3].bias[:8] = 1.0
        case.module[5].weight[0, 8:] = 0.0

    pruned = prune(
        case.module, (x,), importance="taylor", batches=[x], loss=lambda m, b: m(b)[:, 0].sum(), fraction={"3": 56 / 64}
    )

    assert pruned.plan.remaining["3.weight"][0] == tuple(range(8))


def test_a_function_may_rank_and_sizes_are_rounded() -> None:
    case = plain("mlp")

    def last_first(_: nn.Module, group: UnitGroup) -> list[float]:
        return [float(-i) for i in range(group.num_units)]

    pruned = prune(case.module, case.inputs, importance=last_first, fraction={"0": 0.3}, round_to=16)

    assert pruned.plan.remaining["0.weight"][0] == tuple(range(48))
    assert [group.name for group in pruned.report.groups] == ["0"]


def test_heads_of_torchs_attention_and_the_width_stay_equal() -> None:
    case = plain("encoder")

    attention = prune(case.module, case.inputs, fraction=0.5).model.layers.layers[0].self_attn

    assert (attention.num_heads, attention.embed_dim, attention.head_dim) == (2, 16, 8)


def test_widths_that_attention_cannot_have_are_refused() -> None:
    case = plain("encoder")

    with pytest.raises(UsageError, match="MultiheadAttention needs them equal"):
        prune(
            case.module, case.inputs, fraction={"layers.layers.0.self_attn*": 0.5, "layers.layers.1.self_attn*": 0.25}
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fraction": 1.0}, "outside 0..1"),
        ({"round_to": 0}, "round_to 0 is not positive"),
        ({"num_state": 2}, "num_state 2 does not fit 1 inputs"),
        ({"importance": "taylor"}, "needs batches and loss"),
        ({"importance": "size"}, "importance 'size' is not known"),
        ({"keep": ["nothing.*"]}, r"'nothing.\*' names no group"),
        ({"importance": lambda m, g: [1.0]}, "importance gave 1 numbers"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        prune(plain("mlp").module, plain("mlp").inputs, **options)  # type: ignore[arg-type]


def test_nothing_to_prune_is_a_refusal() -> None:
    with pytest.raises(PlanError, match="nothing of Linear can go"):
        prune(nn.Linear(8, 4), (torch.randn(2, 8),))
    with pytest.raises(PlanError, match="nothing of Sequential can go"):
        prune(plain("mlp").module, plain("mlp").inputs, keep=["*"])


def test_a_model_that_cannot_be_exported_is_refused() -> None:
    class Branches(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + 1 if float(x.sum()) > 0 else x

    with pytest.raises(PlanError, match="Branches cannot be exported"):
        prune(Branches(), (torch.randn(3),))


class WrittenHeads(nn.Module):
    """Four heads, written into the code; a norm by hand, whose mean counts units; a grouped convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.qkv, self.out = nn.Linear(8, 16), nn.Linear(16, 48), nn.Linear(16, 16)
        self.mix, self.head = nn.Conv1d(16, 16, 3, padding=1, groups=4), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x)
        q, k, v = (z.unflatten(-1, (4, -1)).transpose(1, 2) for z in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, scale=0.5).transpose(1, 2).flatten(2)
        x = x + self.out(y)
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.head(self.mix(x.transpose(1, 2)).transpose(1, 2))


def test_where_heads_are_written_into_the_code_their_size_goes_instead() -> None:
    model = WrittenHeads()

    pruned = prune(model, (torch.randn(2, 5, 8),))

    assert pruned.model.out.in_features == 8
    remaining = pruned.plan.remaining["out.weight"][1]
    assert remaining is not None
    assert [sum(i // 4 == head for i in remaining) for head in range(4)] == [2, 2, 2, 2]
    assert "from the masked original" in next(p.because for p in pruned.report.pinned if p.place == "qkv")
    assert pruned.model.mix.groups == pruned.model.mix.in_channels // 4 == 2


def test_a_wrong_cut_is_never_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a rule that forgets to tie, nothing wrong comes out: what does not hold stays whole."""
    from flatout.shrink.prune import operator_rules

    monkeypatch.setitem(operator_rules.RULES, "layer_norm", lambda call: call.shape("input"))

    pruned = prune(plain("mlp").module, plain("mlp").inputs)

    assert [group.name for group in pruned.report.groups] == ["3"]
    assert "RuntimeError" in next(p.because for p in pruned.report.pinned if p.place == "0")
