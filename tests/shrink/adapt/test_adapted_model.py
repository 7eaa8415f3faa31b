"""Adapters on plain models: start, training, switching, merging, and the plain model back."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.plain_models import PLAIN, plain
from torch import Tensor, nn

from flatout.core.errors import UsageError
from flatout.core.records.adapt import BitFit, Bottleneck, Freeze, Lora, Method, Prefix, Prompt
from flatout.shrink.adapt.adapted_model import Adapted, adapt
from flatout.shrink.adapt.api import lora

START_EQUAL: dict[str, Method] = {
    "lora": Lora(rank=2),
    "dora": Lora(rank=2, is_dora=True),
    "bottleneck": Bottleneck(width=4),
    "bitfit": BitFit(),
    "freeze": Freeze(last=2),
}


def first(outputs: Any) -> Tensor:
    found = outputs if isinstance(outputs, Tensor) else outputs[0]
    assert isinstance(found, Tensor)
    return found


def train(adapted: Adapted, inputs: tuple[Tensor, ...], *, steps: int = 2) -> None:
    optimizer = torch.optim.SGD(adapted.parameters(), lr=0.3)
    for _ in range(steps):
        optimizer.zero_grad()
        (first(adapted.model(*inputs)) - 1).square().mean().backward()
        optimizer.step()


def state_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_is(model: nn.Module, before: dict[str, Tensor]) -> None:
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


@pytest.mark.slow
@pytest.mark.parametrize("method", START_EQUAL.values(), ids=START_EQUAL)
@pytest.mark.parametrize("name", PLAIN)
def test_starts_as_the_plain_model_learns_and_is_undone_bit_for_bit(name: str, method: Method) -> None:
    model, inputs, _ = plain(name)
    kinds = [type(module) for module in model.modules()]
    before, expected = state_of(model), first(copy.deepcopy(model)(*inputs))
    random = torch.get_rng_state()

    adapted = adapt(model, method)
    assert torch.equal(torch.get_rng_state(), random)
    assert torch.equal(first(copy.deepcopy(model)(*inputs)), expected)
    train(adapted, inputs)
    assert not torch.equal(first(model(*inputs)), expected)

    adapted.undo()
    assert_is(model, before)
    assert [type(module) for module in model.modules()] == kinds
    assert all(p.requires_grad and p.grad is None for p in model.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@pytest.mark.slow
@pytest.mark.parametrize("is_dora", [False, True])
@pytest.mark.parametrize("name", PLAIN)
def test_merged_is_adapted_within_rounding_and_unmerges_bit_for_bit(name: str, is_dora: bool) -> None:
    model, inputs, _ = plain(name)
    plain_before = state_of(model)
    adapted = lora(model, rank=2, is_dora=is_dora)
    train(adapted, inputs)
    before = state_of(model)

    merged = adapted.merge(*inputs)
    assert merged.weight_error <= torch.finfo(torch.float32).eps
    assert merged.adapted_error is not None and merged.merged_error is not None
    assert merged.merged_error <= 2 * merged.adapted_error + 4 * torch.finfo(torch.float32).eps
    assert any(not torch.equal(plain_before[n], t) for n, t in model.state_dict().items() if n in plain_before)
    adapted.unmerge()
    assert_is(model, before)


@pytest.mark.parametrize("name", ["mlp", "encoder", "gru", "unet"])
def test_a_baked_model_is_plain_and_computes_as_the_adapted_one(name: str) -> None:
    model, inputs, _ = plain(name)
    names = list(model.state_dict())
    adapted = lora(model, rank=2)
    train(adapted, inputs)
    model.eval()
    expected = first(model(*inputs))
    baked = adapted.bake()
    assert list(baked.state_dict()) == names
    torch.testing.assert_close(first(baked(*inputs)), expected, rtol=1e-5, atol=1e-6)


def test_fused_fast_paths_of_torch_see_the_adapter() -> None:
    model, inputs, _ = plain("encoder")
    adapted = lora(model, rank=2)
    train(adapted, inputs)
    model.eval()
    slow = model(*inputs)
    with torch.inference_mode():
        fast = model(*inputs)
    torch.testing.assert_close(fast, slow, rtol=1e-4, atol=1e-5)
    adapted.off()
    assert (first(model(*inputs)) - slow).abs().max() > 1e-3


def test_only_what_is_trained_gets_gradients_and_state() -> None:
    model, inputs, _ = plain("transformer")
    adapted = lora(model, rank=2, targets=["out"])
    assert adapted.trained.parameters == sum(p.numel() for p in adapted.parameters()) == 2 * 2 * (32 + 32)
    first(model(*inputs)).square().mean().backward()
    with_gradient = {name for name, p in model.named_parameters() if p.grad is not None}
    assert with_gradient == {name for name, _ in adapted.named_parameters()}


def test_backward_ends_at_the_first_trained_layer() -> None:
    model, inputs, _ = plain("transformer")
    seen: list[bool] = []
    assert isinstance(model.words, nn.Module) and isinstance(model.blocks, nn.Sequential)
    for module in (model.words, model.blocks[0], model.blocks[1]):
        module.register_forward_hook(lambda m, a, out: seen.append(out.requires_grad))
    adapt(model, Freeze(keep=("blocks.1", "norm", "head")))
    model(*inputs)
    assert seen == [False, False, True]


def test_named_adapters_are_switched_bit_for_bit() -> None:
    model, inputs, _ = plain("cnn")
    expected = model.eval()(*inputs)
    model.train()
    adapted = lora(model, rank=2, name="left")
    train(adapted, inputs)
    left = model.eval()(*inputs)
    adapted.add(Bottleneck(width=4), name="right")
    assert torch.equal(model(*inputs), expected)
    train(adapted, inputs)
    right = model(*inputs)
    adapted.add(BitFit(), name="biases")
    train(adapted, inputs)
    biases = model(*inputs)
    for name, outputs in {"left": left, "right": right, "biases": biases, "left ": left}.items():
        adapted.use(name.strip())
        assert torch.equal(model(*inputs), outputs)
    adapted.off()
    assert torch.equal(model(*inputs), expected)
    assert not torch.equal(left, right)
    assert adapted.names == ("left", "right", "biases")


def test_running_statistics_belong_to_the_adapter() -> None:
    model, inputs, _ = plain("cnn")
    before = state_of(model)
    adapted = lora(model, rank=2)
    train(adapted, inputs)
    assert "stem.1.running_mean" in adapted.state()
    adapted.off()
    assert all(torch.equal(model.state_dict()[name], t) for name, t in before.items())


def test_seeds_make_adapters_alike() -> None:
    def drawn(seed: int | torch.Generator) -> Tensor:
        return next(lora(plain("mlp").module, rank=2, seed=seed).parameters()).detach()

    assert torch.equal(drawn(3), drawn(torch.Generator().manual_seed(3)))
    assert not torch.equal(drawn(3), drawn(4))


def test_copies_are_independent() -> None:
    model, inputs, _ = plain("transformer")
    adapted = adapt(model, Bottleneck(width=4))
    train(adapted, inputs)
    twin = copy.deepcopy(adapted)
    expected = model(*inputs)
    train(adapted, inputs)
    assert torch.equal(twin.model(*inputs), expected)
    twin.undo()
    assert not torch.equal(model(*inputs), expected)


def test_state_dicts_of_adapted_models_go_back_in() -> None:
    model, inputs, _ = plain("gru")
    adapted = lora(model, rank=2)
    train(adapted, inputs)
    other = plain("gru", seed=1).module
    lora(other, rank=2)
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(*inputs), model(*inputs))


@pytest.mark.parametrize("is_training", [True, False])
def test_the_mode_of_modules_is_left_as_it_is(is_training: bool) -> None:
    model, inputs, _ = plain("mlp")
    model.train(is_training)
    adapted = lora(model, rank=2)
    adapted.merge(*inputs)
    assert model.training == is_training
    adapted.undo()
    assert model.training == is_training


def test_autocast_computes_pairs_in_the_lower_precision() -> None:
    model, inputs, _ = plain("transformer")
    adapted = lora(model, rank=2)
    with torch.autocast("cpu", torch.bfloat16):
        out = model(*inputs)
    assert out.dtype == torch.bfloat16
    out.float().square().mean().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in adapted.parameters())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize(
    "make",
    [lora, lambda m: lora(m, is_dora=True), lambda m: adapt(m, Bottleneck())],
    ids=["lora", "dora", "bottleneck"],
)
def test_an_adapted_model_exports(make: Callable[[nn.Module], Adapted]) -> None:
    model, inputs, _ = plain("transformer", width=64)
    adapted = make(model)
    train(adapted, inputs, steps=1)
    exported = torch.export.export(model, inputs).module()
    torch.testing.assert_close(exported(*inputs), model(*inputs))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_an_adapted_model_is_one_graph_and_compiling_follows_the_switch() -> None:
    model, inputs, _ = plain("mlp")
    adapted = lora(model, rank=2)
    train(adapted, inputs)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(*inputs), model(*inputs))
    adapted.off()
    torch.testing.assert_close(compiled(*inputs), model(*inputs))


# -- prompts and prefixes ----------------------------------------------------------------------------------------------------


def test_a_prompt_before_the_blocks_is_seen_trained_and_cut() -> None:
    model, inputs, _ = plain("transformer")
    before, expected = state_of(model), model(*inputs)
    adapted = adapt(model, Prompt(before="blocks", num_vectors=3))
    out = model(*inputs)
    assert out.shape == expected.shape and not torch.equal(out, expected)
    assert [tuple(p.shape) for p in adapted.parameters()] == [(3, 32)]
    train(adapted, inputs)
    adapted.off()
    assert torch.equal(model(*inputs), expected)
    adapted.undo()
    assert_is(model, before)


def test_a_prompt_after_an_embedding_starts_from_its_rows() -> None:
    model = nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 4))
    adapted = adapt(model, Prompt(after="0", num_vectors=5))
    (vectors,) = adapted.parameters()
    rows = model[0].weight
    assert all(any(torch.equal(v, row) for row in rows) for v in vectors)
    assert model(torch.arange(6).view(2, 3)).shape == (2, 3, 4)
    adapted.undo()
    adapt(model, Prompt(after="0", num_vectors=5, is_cut=False))
    assert model(torch.arange(6).view(2, 3)).shape == (2, 8, 4)


def test_a_prompt_that_cannot_be_cut_off_says_so() -> None:
    model, inputs, _ = plain("encoder")
    adapt(model, Prompt(after="into", num_vectors=3))
    with pytest.raises(UsageError, match="no 3 prompt vectors"):
        model(*inputs)


@pytest.mark.parametrize("is_batch_first", [True, False])
def test_a_prefix_is_further_keys_and_values_past_every_mask(is_batch_first: bool) -> None:
    attention = nn.MultiheadAttention(8, 2, batch_first=is_batch_first)
    model = nn.ModuleDict({"attention": attention})
    adapted = adapt(model, Prefix(num_vectors=2))
    x = torch.randn(3, 5, 8)
    given = x if is_batch_first else x.transpose(0, 1)
    mask = torch.triu(torch.full((5, 5), float("-inf")), 1)
    out, _ = attention(given, given, given, attn_mask=mask, is_causal=True, need_weights=False)
    out = out if is_batch_first else out.transpose(0, 1)

    parts = dict(adapted.named_parameters())
    keys, values = (next(p for n, p in parts.items() if n.endswith(end)) for end in ("keys", "values"))
    w, b = attention.in_proj_weight.chunk(3), attention.in_proj_bias.chunk(3)
    heads = lambda y: y.view(3, -1, 2, 4).transpose(1, 2)  # noqa: E731
    q = heads(x @ w[0].T + b[0])
    k = heads(torch.cat((keys.expand(3, -1, -1), x), 1) @ w[1].T + b[1])
    v = heads(torch.cat((values.expand(3, -1, -1), x), 1) @ w[2].T + b[2])
    seen = torch.cat((torch.zeros(5, 2), mask), 1)
    y = torch.softmax(q @ k.transpose(2, 3) / 2 + seen, -1) @ v
    torch.testing.assert_close(out, attention.out_proj(y.transpose(1, 2).reshape(3, 5, 8)))


def test_a_prefix_reaches_the_encoder_in_eval_mode_too() -> None:
    model, inputs, _ = plain("encoder")
    expected = model.eval()(*inputs)
    adapted = adapt(model, Prefix(num_vectors=2))
    train(adapted, inputs)
    with torch.inference_mode():
        assert (model(*inputs) - expected).abs().max() > 1e-4
    adapted.undo()
    assert torch.equal(model(*inputs), expected)


# -- refusals ----------------------------------------------------------------------------------------------------------------


def _weight_norm() -> nn.Module:
    return nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)), nn.Linear(8, 8))


class Own(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "parametrized": (lambda: lora(_weight_norm(), rank=1, targets=["0"]), "parametrized"),
    "own class": (lambda: lora(nn.Sequential(Own(8, 8)), rank=1, targets=["0"]), "class of its own"),
    "groups": (lambda: lora(plain("separable").module, targets=["depth"]), "16 groups"),
    "no weight": (lambda: lora(plain("mlp").module, targets=["1"]), "GELU"),
    "unknown": (lambda: lora(plain("mlp").module, targets=["nose"]), "names no module"),
    "rank": (lambda: lora(plain("mlp").module, rank=0), "below 1"),
    "too high": (lambda: lora(plain("mlp").module, rank=500), "more than half"),
    "budget": (lambda: lora(plain("mlp").module, rank=4, budget=3), "budget"),
    "transposed": (lambda: lora(plain("unet").module, is_dora=True, targets=["up_a"]), "rows are inputs"),
    "twice": (lambda: adapt(lora(plain("mlp").module).model, BitFit()), "adapters already"),
    "prefix": (lambda: adapt(plain("transformer").module, Prefix()), "prompt `before`"),
    "out_proj": (lambda: adapt(plain("encoder").module, Bottleneck(after=("out_proj",))), "never called"),
    "prompt": (lambda: adapt(plain("transformer").module, Prompt()), "one place"),
    "freeze": (lambda: adapt(plain("mlp").module, Freeze()), "needs one of"),
    "last": (lambda: adapt(plain("mlp").module, Freeze(last=9)), "outside 1..4"),
    "biases": (lambda: adapt(nn.Linear(3, 3, bias=False), BitFit()), "no biases"),
    "name": (lambda: lora(plain("mlp").module, name="a.b"), "name"),
    "merge": (lambda: adapt(plain("mlp").module, Bottleneck()).merge(), "no weight to merge"),
    "unmerge": (lambda: lora(plain("mlp").module).unmerge(), "nothing is merged"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_done_is_refused(case: str) -> None:
    call, reason = REFUSED[case]
    with pytest.raises(UsageError, match=reason):
        call()


def test_a_merged_adapter_is_not_trained_or_switched() -> None:
    adapted = lora(plain("mlp").module)
    adapted.merge()
    for call in (
        adapted.off,
        lambda: adapted.add(BitFit(), name="b"),
        lambda: list(adapted.parameters()),
        adapted.merge,
    ):
        with pytest.raises(UsageError, match="merged"):
            call()
    adapted.undo()


def test_a_shared_weight_is_not_merged() -> None:
    model = nn.Sequential(nn.Embedding(32, 16), nn.Linear(16, 32, bias=False))
    model[1].weight = model[0].weight
    adapted = lora(model, rank=2)
    with pytest.raises(UsageError, match="both would change"):
        adapted.merge()


def test_a_refused_method_leaves_the_model_as_it_was() -> None:
    model = plain("mlp").module
    before = state_of(model)
    with pytest.raises(UsageError):
        lora(model, rank=500)
    assert_is(model, before)
    assert all(p.requires_grad for p in model.parameters())


# -- choices -----------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@given(st.integers(200, 20_000), st.sampled_from(["mlp", "transformer", "encoder", "unet", "gru"]))
def test_a_chosen_rank_stays_within_the_budget(budget: int, name: str) -> None:
    try:
        adapted = lora(plain(name).module, rank=None, budget=budget)
    except UsageError as e:
        assert "budget" in str(e)
        return
    assert sum(p.numel() for p in adapted.parameters()) == adapted.trained.parameters <= budget


def test_a_tight_budget_takes_the_largest_weights_first() -> None:
    adapted = lora(plain("transformer").module, rank=2, budget=300)
    assert adapted.trained.hosts == ("blocks.0.qkv/weight",)
    assert "do not fit" in adapted.trained.why["blocks.1.out"]


def test_the_last_modules_are_kept_within_a_budget() -> None:
    model = plain("mlp").module
    adapted = adapt(model, Freeze(budget=700))
    assert [name for name, _ in adapted.named_parameters()] == ["5.weight", "5.bias"]
    adapted.undo()
    assert [n for n, _ in adapt(model, Freeze(keep=("2", "5.bias"))).named_parameters()] == [
        "2.weight",
        "2.bias",
        "5.bias",
    ]


def test_prompts_count_as_trained() -> None:
    adapted = adapt(plain("transformer").module, Prompt(before="blocks", num_vectors=4))
    assert adapted.trained.parameters == 4 * 32
