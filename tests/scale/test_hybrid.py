"""Models whose layers differ: state-space mixers, attention, feed-forwards and experts by a pattern, and compressed keys."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import ValidationError, convert, structs

from flatout.core.errors import PlanError
from flatout.core.records.scale import Layout, ModelShape
from flatout.scale.activations import activation_bytes
from flatout.scale.inputs import cluster_of, read_model
from flatout.scale.intervals import model_kind
from flatout.scale.memory import memory_of
from flatout.scale.presets import PRESETS
from flatout.scale.pricing import price
from flatout.scale.rules import broken_rules
from flatout.scale.sizes import active_parameters, layer_kinds, num_parameters

MODELS = tomllib.loads((Path(__file__).parents[2] / "bench" / "planner" / "models.toml").read_text(encoding="utf-8"))
PLAIN = ModelShape(hidden=4096, layers=8, heads=32, vocab=32000, seq=4096, ffn=16384)
ALONE = Layout(micro_batch=4, global_batch=16)
NANO = MODELS["nemotron-3-nano"]


def model(name: str, **changes: object) -> ModelShape:
    return convert({**MODELS[name], **changes}, ModelShape)


@pytest.mark.parametrize(
    ("name", "billions", "active"),
    [
        ("nemotron-3-nano", 31.6, 3.6),
        ("nemotron-3-super", 120.6, 12.7),
        ("nemotron-3-ultra", 550, 55),
        ("deepseek-v4-flash", 284, 13),
    ],
)
def test_published_models_have_as_many_parameters_as_their_reports_say(
    name: str, billions: float, active: float
) -> None:
    alone = {"extra_tokens": 0, "extra_pattern": ""}
    shape = model(name, **alone)
    of_layers, of_embedding = num_parameters(shape)
    assert (of_layers + 2 * of_embedding) / 1e9 == pytest.approx(billions, rel=0.005)
    assert (active_parameters(shape) + 2 * of_embedding) / 1e9 == pytest.approx(active, rel=0.06)


def test_a_pattern_of_attention_and_feed_forwards_is_a_plain_model() -> None:
    written = structs.replace(PLAIN, layers=16, pattern="*-" * 8)
    assert num_parameters(written) == num_parameters(PLAIN)
    assert active_parameters(written) == active_parameters(PLAIN)
    software, cluster = PRESETS["megatron-core"].software, cluster_of("1xh100-sxm")
    whole, parts = (price(shape, ALONE, cluster, software) for shape in (PLAIN, written))
    assert parts.step.total_s == pytest.approx(whole.step.total_s, rel=1e-6)
    (of_whole,), (of_parts,) = (memory_of(shape, ALONE, software) for shape in (PLAIN, written))
    assert of_parts.activation_bytes == pytest.approx(of_whole.activation_bytes, rel=1e-6)
    assert of_parts.weight_bytes == of_whole.weight_bytes


def test_states_take_as_long_for_each_token_however_long_a_sample_is() -> None:
    cluster, software = cluster_of("1xh200"), PRESETS["megatron-core"].software
    mixers = {letter: [] for letter in "M*"}  # type: dict[str, list[float]]
    for letter, found in mixers.items():
        for seq in (4096, 131072):
            sizes = {"pattern": letter * 4, "layers": 4, "seq": seq, "vocab": 1024, "num_experts": 1, "state": None}
            sizes |= {"experts_per_token": 1, "expert_ffn": None, "shared_experts": 0, "shared_ffn": None}
            sizes |= {"state": NANO["state"]} if letter == "M" else {}
            shape = model("nemotron-3-nano", **sizes)
            step = price(shape, Layout(micro_batch=131072 // seq, global_batch=131072 // seq), cluster, software).step
            found.append(step.total_s)
    assert mixers["M"][1] == pytest.approx(mixers["M"][0], rel=0.01)
    assert mixers["*"][1] > 3 * mixers["*"][0]


def test_experts_of_shorter_vectors_send_and_compute_less() -> None:
    shape = model("nemotron-3-super")
    wide = structs.replace(shape, expert_hidden=None)
    layout = Layout(data=64, expert=64, expert_tensor=1, micro_batch=1, global_batch=512, shard=1)
    cluster, software = cluster_of("64xgb300"), structs.replace(PRESETS["megatron-core"].software, dtype="mxfp8")
    short, long = (price(one, layout, cluster, software).step for one in (shape, wide))
    assert short.expert_s == pytest.approx(long.expert_s / 4, rel=0.1)
    assert short.compute_s < long.compute_s


def test_layers_that_stay_in_half_precision_take_longer() -> None:
    shape, cluster = model("nemotron-3-super"), cluster_of("64xgb300")
    layout = Layout(data=64, expert=64, expert_tensor=1, micro_batch=1, global_batch=512, shard=1)
    base = structs.replace(PRESETS["megatron-core"].software, dtype="nvfp4")
    changes: list[dict[str, Any]] = [
        {},
        {"half_parts": ("attention",)},
        {"half_parts": ("attention", "latent-experts")},
        {"half_parts": ("attention", "latent-experts"), "half_layers": 14},
        {"half_layers": 88},
        {"dtype": "bfloat16", "half_layers": 14},
        {"dtype": "bfloat16"},
    ]
    seconds = [price(shape, layout, cluster, structs.replace(base, **one)).step.compute_s for one in changes]
    assert seconds[:4] == sorted(seconds[:4]) and len(set(seconds[:4])) == 4
    assert seconds[4] > seconds[3]
    assert seconds[5] == seconds[6]  # nothing has fewer bits


@given(
    tensor=st.sampled_from([1, 2, 4, 8]),
    pattern=st.text("M*-E", min_size=4, max_size=12),
    dtype=st.sampled_from(["bfloat16", "float8"]),
    recompute=st.sampled_from(["none", "selective", "full"]),
)
@settings(max_examples=60, deadline=None)
def test_any_pattern_has_a_price_that_more_bandwidth_does_not_raise(
    tensor: int, pattern: str, dtype: str, recompute: Any
) -> None:
    sizes = {"pattern": pattern, "layers": len(pattern), "kv_heads": 8}
    if "M" not in pattern:
        sizes["state"] = None
    shape = model("nemotron-3-nano", **sizes)
    layout = Layout(
        tensor=tensor, expert_tensor=1, expert=tensor, micro_batch=1, global_batch=4, recompute=recompute,
        is_sequence_parallel=tensor > 1,
    )  # fmt: skip
    software = structs.replace(PRESETS["megatron-core"].software, dtype=dtype)
    cluster = cluster_of("8xh100-sxm")
    fast = structs.replace(
        cluster, tiers=tuple(structs.replace(t, bytes_per_s=4 * t.bytes_per_s) for t in cluster.tiers)
    )
    found, faster = (price(shape, layout, one, software) for one in (cluster, fast))
    assert 0 < faster.step.total_s <= found.step.total_s
    for kind in layer_kinds(shape):
        some, more = (activation_bytes(shape, structs.replace(layout, micro_batch=n), software, kind) for n in (1, 2))
        assert more == pytest.approx(2 * some)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"pattern": "MX" * 26}, "pattern has 'X'"),
        ({"pattern": "M*"}, "pattern has 2 letters; give one for each of 52 layers"),
        ({"state": None}, r"give its sizes in \[state\]"),
        ({"state": {"heads": 64, "head_dim": 64, "size": 128, "groups": 7}}, "no multiple of state.groups 7"),
        ({"state": {"heads": 0, "head_dim": 64, "size": 128}}, "state.heads is 0"),
        ({"pattern": "*-" * 26}, r"\[state\] is of layers M of a pattern"),
        ({"window": 128}, "leave pattern out"),
        ({"extra_pattern": "*E"}, "give extra_tokens, too"),
        ({"num_experts": 1, "experts_per_token": 1, "shared_experts": 0}, "shared_ffn and expert_hidden are of models"),
        ({"compressed": {"ratios": [4]}, "pattern": "", "state": None}, "give one for each of 52 layers"),
        ({"compressed": {"ratios": [4] * 52, "indexed": [128]}}, "compressed.indexed has 128"),
        ({"compressed": {"ratios": [4] * 52, "indexed": [4]}}, "needs selected, index_heads and index_dim"),
    ],
)
def test_sizes_that_cannot_be_are_refused(changes: Mapping[str, object], words: str) -> None:
    with pytest.raises((PlanError, ValidationError), match=words):
        model("nemotron-3-nano", **changes)


def test_states_divide_among_tensor_ranks_by_their_groups() -> None:
    names = {rule.name for rule in broken_rules(model("nemotron-3-nano", kv_heads=16), Layout(tensor=16))}
    assert names == {"states"}


def test_compressed_keys_take_less_than_all_of_them() -> None:
    shape = model("deepseek-v4-flash", seq=65536)
    whole = structs.replace(shape, compressed=None, window=0)
    layout = Layout(data=128, expert=64, expert_tensor=1, micro_batch=1, global_batch=128, shard=1)
    software, cluster = PRESETS["megatron-core-overlapped"].software, cluster_of("128xgb300")
    found, plain = (price(one, layout, cluster, software).step for one in (shape, whole))
    assert found.compute_s < 0.6 * plain.compute_s


def test_a_file_says_a_pattern_and_states(tmp_path: Path) -> None:
    lines = [f"{name} = {str(value).lower() if isinstance(value, bool) else repr(value)}" for name, value in NANO.items()
             if name != "state"]  # fmt: skip
    lines += ["[state]", *(f"{name} = {value}" for name, value in NANO["state"].items())]
    file = tmp_path / "nano.toml"
    file.write_text("\n".join(lines), encoding="utf-8")
    shape = read_model(file)
    assert shape == model("nemotron-3-nano")
    assert model_kind(shape) == "hybrid"
    layout, cluster = Layout(data=8, expert=8, micro_batch=4, global_batch=512, shard=1), cluster_of("8xgb300")
    software = structs.replace(PRESETS["megatron-core"].software, dtype="mxfp8")
    found = price(shape, layout, cluster, software, preset="megatron-core")
    assert any(re.match(r"interval: .*published steps", text) for text in found.assumptions)
    assert "a guess" not in " ".join(found.assumptions)  # hybrid models were compared on this device
