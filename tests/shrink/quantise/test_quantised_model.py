"""quantise: which layers it replaces, what it leaves, undoing, saving and loading."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path

import pytest
import torch
from tests.plain_models import PLAIN, plain
from torch import Tensor, nn

from flatout.core.errors import CheckpointError, UsageError
from flatout.core.tensors import nests as pytree
from flatout.shrink.quantise import load_quantised, quantise, stored_bytes
from flatout.shrink.quantise.schemes import ALL, default
from flatout.shrink.quantise.torch_layers import Fp8

pytestmark = pytest.mark.skipif(
    not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="the kernel is compiled here: no C compiler"
)


def mlp() -> tuple[nn.Sequential, Tensor]:
    layers = plain("mlp")
    assert isinstance(layers.module, nn.Sequential)
    return layers.module.eval(), layers.inputs[0]


def off(found: object, wanted: object) -> float:
    pairs = zip(pytree.tree_leaves(found), pytree.tree_leaves(wanted), strict=True)
    return max(float((a.double() - b.double()).norm() / b.double().norm()) for a, b in pairs)


@pytest.mark.parametrize("name", [name for name in PLAIN if name != "tcn"])
def test_every_plain_model_is_close_in_eight_bits_and_is_as_it_was_afterwards(name: str) -> None:
    model, inputs, _ = plain(name)
    model.eval()
    before = copy.deepcopy(model.state_dict())
    with torch.inference_mode():
        wanted = model(*inputs)
        quantised = quantise(model, "int8")
        assert off(quantised(*inputs), wanted) < 0.05
        assert off(model(*inputs), wanted) == 0
        assert off(quantised.undo()(*inputs), wanted) == 0
    assert before.keys() == model.state_dict().keys() == quantised.module.state_dict().keys()
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert quantised.schemes == {}


def test_undone_layers_are_not_the_models_own() -> None:
    model, _ = mlp()
    undone = quantise(model, "int8").undo()
    assert not {id(p) for p in undone.parameters()} & {id(p) for p in model.parameters()}


def test_layers_are_not_copied_twice() -> None:
    model, _ = mlp()
    quantised = quantise(model, "int8")
    assert stored_bytes(quantised.module) < stored_bytes(model) * 0.6


def test_the_first_pattern_that_fits_counts() -> None:
    model, _ = mlp()
    quantised = quantise(model, {"3": "int4", "[03]": "int8"})
    assert quantised.schemes == {"0": "int8", "3": "int4"}
    assert quantised.unchanged == {"5": "no pattern fits it"}


def test_a_module_at_two_places_is_replaced_at_both() -> None:
    layer = nn.Linear(8, 8)
    quantised = quantise(nn.Sequential(layer, nn.ReLU(), layer).eval(), "int8")
    assert isinstance(quantised.module, nn.Sequential)
    assert quantised.module[0] is quantised.module[2]
    assert not isinstance(quantised.module[0], nn.Linear)


def test_a_model_that_is_one_layer_is_replaced() -> None:
    layer = nn.Linear(8, 8).eval()
    quantised = quantise(layer, "int8")
    assert quantised.module is not layer
    assert isinstance(quantised.undo(), nn.Linear)


def test_an_embedding_that_shares_the_weight_keeps_it() -> None:
    model = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 16, bias=False))
    model[1].weight = model[0].weight
    quantised = quantise(model.eval(), "int8")
    assert torch.equal(quantised.module.get_parameter("0.weight"), model[0].weight)


def test_layers_whose_parent_reads_their_weights_are_left_with_the_reason() -> None:
    quantised = quantise(plain("encoder").module.eval(), "int8")
    assert set(quantised.schemes) == {"into", "head"}
    assert "reads its layers' weights itself" in quantised.unchanged["layers.layers.0.linear1"]


def test_a_layer_with_hooks_is_left_with_the_reason() -> None:
    model, _ = mlp()
    model[0].register_forward_hook(lambda *_: None)
    assert "hooks" in quantise(model, "int8").unchanged["0"]


@pytest.mark.parametrize(
    ("scheme", "told"),
    [
        ("int9", "'int9' is none of"),
        ({"9": "int8"}, "fit no layer"),
        ({"1": "int8"}, "fit no layer"),
        ("int8-static", "calibrate="),
        ("fp8.torch", "GPUs alone"),
        ({"0": "fp8.torch"}, "layer '0' cannot have"),
        ("int4.torchao", "no kernel for a CPU"),
    ],
)
def test_what_cannot_be_done_is_refused_with_the_reason(scheme: str, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        quantise(mlp()[0], scheme)


def test_a_model_in_training_is_refused() -> None:
    with pytest.raises(UsageError, match="eval"):
        quantise(mlp()[0].train(), "int8")


@pytest.mark.parametrize("observer", ["min-max", "percentile", "least-error", "entropy"])
def test_scales_seen_beforehand_come_from_the_batches(observer: str) -> None:
    model, x = mlp()
    quantised = quantise(model, "int8-static", calibrate=[x, (x,)], observer=observer)  # type: ignore[arg-type]
    with torch.inference_mode():
        assert off(quantised(x), model(x)) < 0.05
    assert not model[0]._forward_pre_hooks


@pytest.mark.parametrize("scheme", ["int8", "int8-dynamic", "int4", "bf16.torch", "int8-static"])
def test_what_is_saved_is_loaded_bit_for_bit_beside_another_models_numbers(scheme: str, tmp_path: Path) -> None:
    model, x = mlp()
    saved = quantise(model, scheme, calibrate=[x])
    saved.save(tmp_path / "model.pt")
    other = plain("mlp", seed=1).module.eval()
    loaded = load_quantised(tmp_path / "model.pt", model=other)
    with torch.inference_mode():
        assert torch.equal(loaded(x), saved(x))
        assert not torch.equal(other(x), model(x))
    assert loaded.schemes == saved.schemes


@pytest.mark.parametrize("name", ["gru", "lstm_step", "cnn"])
def test_recurrent_layers_and_convolutions_are_saved_too(name: str, tmp_path: Path) -> None:
    model, inputs, _ = plain(name)
    saved = quantise(model.eval(), "int8")
    saved.save(tmp_path / "model.pt")
    loaded = load_quantised(tmp_path / "model.pt", model=plain(name, seed=1).module.eval())
    with torch.inference_mode():
        assert off(loaded(*inputs), saved(*inputs)) == 0


def test_a_file_of_another_model_is_refused(tmp_path: Path) -> None:
    quantise(mlp()[0], "int8").save(tmp_path / "model.pt")
    for other in (plain("cnn").module.eval(), plain("mlp", width=32).module.eval()):
        with pytest.raises(CheckpointError, match="does not fit"):
            load_quantised(tmp_path / "model.pt", model=other)


def test_files_that_are_damaged_or_missing_are_refused(tmp_path: Path) -> None:
    (tmp_path / "model.pt").write_bytes(b"not a model")
    with pytest.raises(CheckpointError, match=r"model\.pt"):
        load_quantised(tmp_path / "model.pt", model=mlp()[0])
    with pytest.raises(CheckpointError, match="cannot read"):
        load_quantised(tmp_path / "none.pt", model=mlp()[0])
    with pytest.raises(CheckpointError, match="cannot write"):
        quantise(mlp()[0], "int8").save(tmp_path / "none" / "model.pt")


@pytest.mark.parametrize("scheme", ["bf16.torch"])
def test_kernels_of_torch_are_close(scheme: str) -> None:
    model, x = mlp()
    with torch.inference_mode():
        assert off(quantise(model, scheme)(x), model(x)) < 0.05


def test_float8_is_what_its_numbers_say() -> None:
    layer, x = nn.Linear(64, 32), torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    few = Fp8(layer)
    with torch.inference_mode():
        assert off(few(x), layer(x)) < 0.08


def test_defaults_are_known_schemes() -> None:
    for device in ("cpu", "cuda"):
        assert set(default(torch.device(device))) <= set(ALL)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("scheme", ["int8.torchao", "int8-dynamic.torchao"])
def test_torchaos_tensors_are_close_and_are_saved(scheme: str, tmp_path: Path) -> None:
    pytest.importorskip("torchao", reason="torchao is not installed")
    model, x = mlp()
    saved = quantise(model, scheme)
    saved.save(tmp_path / "model.pt")
    loaded = load_quantised(tmp_path / "model.pt", model=plain("mlp", seed=1).module.eval())
    with torch.inference_mode():
        assert off(saved(x), model(x)) < 0.05
        assert torch.equal(loaded(x), saved(x))


@pytest.mark.device
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("scheme", default(torch.device("cuda")))
def test_schemes_of_a_gpu_are_close_or_refuse(scheme: str) -> None:
    model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256)).cuda().eval()
    x = torch.randn(32, 256, device="cuda")
    try:
        few = quantise(model, scheme)
    except UsageError as e:
        pytest.skip(f"refused here: {e}")
    with torch.inference_mode():
        assert off(few(x), model(x)) < (0.2 if "int4" in scheme else 0.08)
