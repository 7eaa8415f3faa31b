"""Adapters as files: flatout's own, and those that PEFT reads and writes."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.plain_models import plain
from torch import Tensor, nn

from flatout.core.errors import CheckpointError, UsageError
from flatout.core.records.adapt import BitFit, Bottleneck, Freeze, Lora, Method, Prefix, Prompt
from flatout.shrink.adapt.adapted_model import Adapted, adapt
from flatout.shrink.adapt.api import lora

METHODS: dict[str, tuple[str, Method]] = {
    "lora": ("unet", Lora(rank=2)),
    "dora": ("encoder", Lora(rank=2, is_dora=True, alpha=8.0)),
    "chosen": ("gru", Lora(rank=None, budget=900)),
    "running statistics": ("cnn", Lora(rank=2)),
    "bottleneck": ("unet", Bottleneck(width=3)),
    "prompt": ("transformer", Prompt(before="blocks")),
    "prefix": ("encoder", Prefix(num_vectors=3)),
    "bitfit": ("cnn", BitFit(also=("head",))),
    "freeze": ("mlp", Freeze(last=2)),
}


def train(adapted: Adapted, inputs: tuple[Tensor, ...], *, steps: int = 2) -> Tensor:
    """The outputs in eval mode after some steps."""
    optimizer = torch.optim.SGD(adapted.parameters(), lr=0.3)
    for _ in range(steps):
        optimizer.zero_grad()
        (adapted.model(*inputs) - 1).square().mean().backward()
        optimizer.step()
    return outputs(adapted.model, inputs)


def outputs(model: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
    with torch.no_grad():
        out = model.eval()(*inputs)
    assert isinstance(out, Tensor)
    return out


@pytest.mark.slow
@pytest.mark.parametrize("case", METHODS)
def test_a_saved_adapter_loads_into_a_plain_copy_bit_for_bit(case: str, tmp_path: Path) -> None:
    name, method = METHODS[case]
    model, inputs, _ = plain(name)
    other = copy.deepcopy(model)
    adapted = adapt(model, method, name="left")
    expected = train(adapted, inputs)
    adapted.save(tmp_path / "adapter.safetensors")

    again = Adapted(other)
    trained = again.load(tmp_path / "adapter.safetensors", name="right")
    assert torch.equal(outputs(other, inputs), expected)
    assert (trained.hosts, trained.parameters) == (adapted.trained.hosts, adapted.trained.parameters)
    assert [p.name for p in tmp_path.iterdir()] == ["adapter.safetensors"]


def test_a_file_holds_the_adapter_alone(tmp_path: Path) -> None:
    model, inputs, _ = plain("mlp")
    adapted = lora(model, rank=2)
    train(adapted, inputs)
    adapted.save(tmp_path / "a.safetensors")
    held = load_file(tmp_path / "a.safetensors")
    assert sum(t.numel() for t in held.values()) == adapted.trained.parameters


def test_files_of_other_models_and_damaged_ones_are_refused(tmp_path: Path) -> None:
    lora(plain("mlp").module, rank=2).save(tmp_path / "a.safetensors")
    for model in (plain("cnn").module, plain("mlp", width=32).module):
        with pytest.raises(CheckpointError, match=r"does not have|another"):
            Adapted(model).load(tmp_path / "a.safetensors")
    data = (tmp_path / "a.safetensors").read_bytes()
    (tmp_path / "b.safetensors").write_bytes(data[: len(data) // 2])
    save_file({"x": torch.ones(2)}, tmp_path / "c.safetensors")
    for name, reason in {"b": "damaged", "c": "no adapter of flatout", "d": "no file"}.items():
        with pytest.raises(CheckpointError, match=reason):
            Adapted(plain("mlp").module).load(tmp_path / f"{name}.safetensors")
    with pytest.raises(CheckpointError, match="nowhere"):
        lora(plain("mlp").module, rank=2).save(tmp_path / "nowhere" / "a.safetensors")


# -- PEFT --------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def peft() -> Any:
    return pytest.importorskip("peft", reason="peft is not installed")


PEFT: dict[str, tuple[str, dict[str, Any]]] = {
    "linear": ("mlp", {}),
    "linear by attention": ("transformer", {"targets": ["qkv", "out"], "alpha": 7.0}),
    "convolutions": ("unet", {"targets": ["a.0", "b.0", "c.0", "d.0", "e.0"]}),
    "dora": ("mlp", {"is_dora": True}),
    "dora of convolutions": ("unet", {"targets": ["b.0", "e.0"], "is_dora": True}),
    "a name that ends another's": ("cnn", {"targets": ["inner.0"]}),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("case", PEFT)
def test_peft_loads_our_folder_and_computes_the_same(peft: Any, case: str, tmp_path: Path) -> None:
    name, options = PEFT[case]
    model, inputs, _ = plain(name)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()
    other = copy.deepcopy(model)
    adapted = lora(model, rank=2, **options)
    expected = train(adapted, inputs)
    adapted.save_peft(tmp_path / "folder")

    theirs = peft.PeftModel.from_pretrained(other, tmp_path / "folder")
    torch.testing.assert_close(outputs(theirs, inputs), expected, rtol=1e-5, atol=2e-6)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("use_rslora", [False, True])
@pytest.mark.parametrize("use_dora", [False, True])
@pytest.mark.parametrize(("name", "targets"), [("transformer", ["qkv", "down"]), ("unet", ["a.0", "d.0"])])
def test_we_load_pefts_folder_and_compute_the_same(
    peft: Any, name: str, targets: list[str], use_dora: bool, use_rslora: bool, tmp_path: Path
) -> None:
    model, inputs, _ = plain(name)
    other = copy.deepcopy(model)
    torch.manual_seed(0)
    config = peft.LoraConfig(
        r=4,
        lora_alpha=6,
        target_modules=targets,
        use_dora=use_dora,
        use_rslora=use_rslora,
        init_lora_weights=False,
        alpha_pattern={targets[0]: 3},
    )
    theirs = peft.get_peft_model(model, config)
    with torch.no_grad():
        for key, parameter in theirs.named_parameters():
            if "magnitude" in key:
                parameter.mul_(1.3)
    theirs.save_pretrained(tmp_path)
    expected = outputs(theirs, inputs)

    adapted = Adapted(other)
    adapted.load_peft(tmp_path)
    torch.testing.assert_close(outputs(other, inputs), expected, rtol=1e-4, atol=1e-4)
    adapted.save_peft(tmp_path / "again")
    back = peft.PeftModel.from_pretrained(plain(name).module, tmp_path / "again")
    torch.testing.assert_close(outputs(back, inputs), expected, rtol=1e-4, atol=1e-4)
    merged = adapted.merge(*inputs)
    assert merged.merged_error is not None and merged.merged_error < 1e-5


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("gru", {}, "'rnn' is GRU"),
        ("encoder", {}, "MultiheadAttention"),
        ("unet", {}, "ConvTranspose2d"),
        ("tcn", {}, "dilation"),
    ],
)
def test_what_peft_cannot_hold_is_refused(name: str, options: dict[str, Any], reason: str, tmp_path: Path) -> None:
    adapted = lora(plain(name).module, rank=2, **options)
    with pytest.raises(UsageError, match=reason):
        adapted.save_peft(tmp_path / "folder")
    assert not (tmp_path / "folder").exists()


def test_other_methods_and_changed_statistics_are_not_written_for_peft(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="Bottleneck"):
        adapt(plain("mlp").module, Bottleneck()).save_peft(tmp_path)
    model, inputs, _ = plain("cnn")
    adapted = lora(model, rank=2)
    train(adapted, inputs)
    with pytest.raises(UsageError, match="running"):
        adapted.save_peft(tmp_path)


@pytest.mark.parametrize(
    ("change", "reason"),
    [({"bias": "all"}, "bias"), ({"modules_to_save": ["5"]}, "modules_to_save"), ({"peft_type": "IA3"}, "IA3")],
)
def test_settings_of_peft_that_are_not_carried_out_are_refused(
    change: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    lora(plain("mlp").module, rank=2).save_peft(tmp_path)
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(UsageError, match=reason):
        Adapted(plain("mlp").module).load_peft(tmp_path)
