"""Training in float8: refusals everywhere, the conversion where torchao is, products where a GPU multiplies float8."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from flatout.blocks.training import float8
from flatout.core.errors import UsageError

NO_FLOAT8 = float8.refusal("cuda") if torch.cuda.is_available() else "no GPU"


def large() -> nn.Sequential:
    return nn.Sequential(nn.Linear(1024, 2048, bias=False), nn.ReLU(), nn.Linear(2048, 1024), nn.Linear(1024, 10))


def test_a_cpu_is_refused_with_the_reason() -> None:
    with pytest.raises(UsageError, match="'cpu' does not multiply float8"):
        float8.convert(large())


@pytest.mark.parametrize(("has", "told"), [((8, 0), "8.0 has no float8"), ((8, 9), None), ((9, 0), None)])
def test_gpus_are_refused_by_their_capability(
    has: tuple[int, int], told: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: has)
    monkeypatch.setattr(torch.version, "hip", None)
    found = float8.refusal("cuda")
    assert found is None if told is None else told in str(found)


@pytest.mark.parametrize(
    ("layer", "told"),
    [
        (nn.Conv2d(4, 4, 1), "is not Linear"),
        (nn.Linear(2048, 1000), "1000 is not a multiple of 16"),
        (nn.Linear(4096, 1024), "casts cost more"),
        (nn.Linear(1024, 2048), None),
        (nn.Linear(8192, 1024), None),
    ],
)
def test_layers_are_left_with_the_reason(layer: nn.Module, told: str | None) -> None:
    found = float8.layer_refusal(layer)
    assert found is None if told is None else told in str(found)


def test_layers_that_others_hang_on_are_left() -> None:
    hooked, compiled, wrapped = (nn.Linear(16, 2048, bias=False) for _ in range(3))
    hooked.register_forward_hook(lambda module, args, output: None)
    compiled._compiled_call_impl = compiled._call_impl

    class Sharded(nn.Parameter):
        """As a parameter that a framework has put in a weight's place."""

    wrapped.weight = Sharded(wrapped.weight.data)
    assert "hooks" in str(float8.layer_refusal(hooked))
    assert "compiled by itself" in str(float8.layer_refusal(compiled))
    assert "Sharded" in str(float8.layer_refusal(wrapped))


def test_rows_scales_need_larger_layers() -> None:
    assert float8.layer_refusal(nn.Linear(2048, 4096, device="meta"), recipe="rowwise") is not None
    assert float8.layer_refusal(nn.Linear(4096, 4096, device="meta"), recipe="rowwise") is None
    assert float8.layer_refusal(nn.Linear(64, 64), recipe="rowwise", sizes="any") is None


@pytest.fixture
def as_if(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if this device multiplied float8: converting needs no product."""
    pytest.importorskip("torchao", reason="torchao is not installed")
    monkeypatch.setattr(float8, "refusal", lambda _: None)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.usefixtures("as_if")
def test_large_layers_are_converted_with_their_parameters_and_put_back() -> None:
    model = large().eval()
    before, layer = dict(model.named_parameters()), model[0]
    found = float8.convert(model, sizes="any", skip=("2",))
    assert found.converted == ("0",)
    assert found.left == {"2": "asked to stay", "3": "10 is not a multiple of 16"}
    assert type(model[0]).__name__ == "Float8Linear" and not model[0].training
    assert all(p is before[name] for name, p in model.named_parameters())
    model.train()
    float8.revert(model, found)
    assert model[0] is layer and layer.training
    assert all(p is before[name] for name, p in model.named_parameters())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.usefixtures("as_if")
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_products_and_gradients_are_rounded_to_float8_and_exact_again_afterwards(recipe: float8.Recipe) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64)).bfloat16()
    x, g = (torch.randn(32, 64, dtype=torch.bfloat16) for _ in range(2))

    def numbers() -> list[Tensor]:
        y: Tensor = model(x)
        return [y.detach(), *torch.autograd.grad(y, [*model.parameters()], g)]

    before = numbers()
    found = float8.convert(model, recipe=recipe, sizes="any")
    errors = [float((a - b).norm() / b.norm()) for a, b in zip(numbers(), before, strict=True)]
    assert max(errors) < 0.15 and sum(error > 0.01 for error in errors) >= 3, errors
    float8.revert(model, found)
    assert all(torch.equal(a, b) for a, b in zip(numbers(), before, strict=True))


@pytest.mark.usefixtures("as_if")
def test_a_layer_that_the_model_holds_twice_is_left() -> None:
    twice, once = nn.Linear(2048, 2048, device="meta"), nn.Linear(2048, 2048, device="meta")
    found = float8.convert(nn.Sequential(twice, once, twice))
    assert found.converted == ("1",)
    assert found.left == dict.fromkeys(("0", "2"), "the model holds it in several places")


@pytest.mark.usefixtures("as_if")
def test_a_model_without_a_large_layer_is_refused() -> None:
    with pytest.raises(UsageError, match="no layer gains"):
        float8.convert(nn.Sequential(nn.Linear(64, 64)))


def test_measuring_is_refused_where_converting_is() -> None:
    with pytest.raises(UsageError, match="cannot measure float8"):
        float8.measure(1024, nn.Linear(1024, 1024))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_many_layers_are_measured_compiled_one_after_the_other() -> None:
    for size in range(2, torch._dynamo.config.recompile_limit + 4):
        layer, x = nn.Linear(size, size + 1), torch.ones(2, size)
        run = torch.compile(float8._alone(nn.Sequential(layer)), fullgraph=True, backend="eager")
        assert torch.equal(run(x), layer(x))


@pytest.mark.device
@pytest.mark.skipif(NO_FLOAT8 is not None, reason=str(NO_FLOAT8))
def test_a_converted_model_trains_like_bfloat16() -> None:
    pytest.importorskip("torchao")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1024)).cuda().bfloat16()
    x, y = (torch.randn(256, 1024, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    losses = []
    for is_float8 in (False, True):
        torch.manual_seed(1)
        for layer in (model[0], model[2]):
            layer.reset_parameters()
        if is_float8:
            float8.convert(model, sizes="any")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(20):
            optimizer.zero_grad()
            loss = (model(x) - y).square().mean()
            loss.backward()
            optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[1] == pytest.approx(losses[0], rel=0.05)


@pytest.mark.device
@pytest.mark.slow
@pytest.mark.skipif(NO_FLOAT8 is not None, reason=str(NO_FLOAT8))
def test_a_layer_is_measured_against_bfloat16() -> None:
    pytest.importorskip("torchao")
    found = float8.measure(4096, nn.Linear(4096, 4096, device="cuda"))
    assert found.ratio is not None and len(found.samples_s) >= 11
