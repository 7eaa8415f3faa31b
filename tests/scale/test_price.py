"""The price of a layout: what it adds up to, what it says, and in which direction it goes."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from flatout.core.errors import HardwareError, PlanError
from flatout.core.records.record import from_json, to_json
from flatout.core.records.scale import Layout, ModelShape, Price, Software, StepTime
from flatout.machine.specs.catalog import load_spec
from flatout.scale.inputs import cluster_of, read_cluster
from flatout.scale.presets import PRESETS, named_software
from flatout.scale.pricing import price
from flatout.scale.usual import reached_share, usual_constants

LLAMA = ModelShape(
    hidden=4096, layers=32, heads=32, kv_heads=8, ffn=14336, vocab=128256, seq=8192, is_gated=True, is_tied=False
)  # fmt: skip
DEEPSEEK = ModelShape(
    hidden=7168, layers=61, heads=128, head_dim=128, query_rank=1536, key_rank=512, rope_dim=64, ffn=18432, dense_layers=3,
    num_experts=256, experts_per_token=8, expert_ffn=2048, shared_experts=1, expert_groups=4, vocab=129280, seq=4096,
    is_gated=True, is_tied=False, extra_tokens=1,
)  # fmt: skip
SHARDED = Layout(data=8, micro_batch=1, global_batch=16, shard=3, recompute="full")


def test_its_parts_add_up_and_it_goes_through_json() -> None:
    found = price(LLAMA, SHARDED, cluster_of("8xh100-sxm"), PRESETS["fsdp2-compiled"].software, preset="fsdp2-compiled")
    parts = [getattr(found.step, name) for name in StepTime.__struct_fields__ if name != "total_s"]
    assert sum(parts) == pytest.approx(found.step.total_s)
    assert found.low_s < found.step.total_s < found.high_s
    assert found.tokens_per_s == pytest.approx(16 * 8192 / found.step.total_s)
    assert found.mfu < found.mfu_whole and found.mfu < found.hfu
    assert from_json(to_json(found), Price) == found


def test_each_assumption_is_in_words() -> None:
    found = price(LLAMA, SHARDED, cluster_of("8xh100-sxm"), PRESETS["fsdp2"].software, preset="fsdp2")
    text = "\n".join(found.assumptions)
    for words in ("products reach 65%", "attention's forward products reach 32%", "node: 450 GB/s", "interval: "):
        assert words in text


def test_a_mixture_with_latent_attention_has_the_parameters_that_its_report_says() -> None:
    """671 billion of which a token meets 37, and 14 more of which it meets 0.6 + the rest to predict a second token."""
    from flatout.scale.sizes import active_parameters, num_parameters

    plain = structs.replace(DEEPSEEK, extra_tokens=0)
    of_layers, of_embedding = num_parameters(plain)
    assert (of_layers + 2 * of_embedding) / 1e9 == pytest.approx(671, rel=0.002)
    assert (active_parameters(plain) + 2 * of_embedding) / 1e9 == pytest.approx(37.5, rel=0.02)


@given(
    tensor=st.sampled_from([1, 2, 4, 8]),
    data=st.sampled_from([1, 2, 4]),
    shard=st.sampled_from([0, 1, 2, 3]),
    faster=st.floats(1.0, 4.0),
)
@settings(max_examples=40)
def test_more_bandwidth_is_never_slower(tensor: int, data: int, shard: int, faster: float) -> None:
    layout = Layout(tensor=tensor, data=data, global_batch=8 * data, shard=shard, is_sequence_parallel=tensor > 1)
    slow = cluster_of("64xh100-sxm")
    tiers = tuple(structs.replace(tier, bytes_per_s=tier.bytes_per_s * faster) for tier in slow.tiers)
    quick = structs.replace(slow, tiers=tiers)
    assert price(LLAMA, layout, quick).step.total_s <= price(LLAMA, layout, slow).step.total_s * (1 + 1e-12)


@given(tensor=st.sampled_from([1, 2, 4, 8]), data=st.sampled_from([1, 2, 4, 8]), shard=st.sampled_from([0, 1, 2, 3]))
@settings(max_examples=40)
def test_a_device_with_more_memory_never_fits_less(tensor: int, data: int, shard: int) -> None:
    layout = Layout(tensor=tensor, data=data, global_batch=8 * data, shard=shard)
    small, large = (price(LLAMA, layout, cluster_of(f"64x{name}")) for name in ("h100-sxm", "h200"))
    assert small.fullest.total_bytes == large.fullest.total_bytes
    assert large.does_fit or not small.does_fit


@given(expert=st.sampled_from([1, 2, 4, 8, 16, 32]))
def test_experts_that_are_divided_further_hold_fewer_bytes(expert: int) -> None:
    layout = Layout(data=64, expert=expert, expert_tensor=1, global_batch=64, shard=1)
    further = structs.replace(layout, expert=2 * expert)
    cluster = cluster_of("64xh200")
    assert (
        price(DEEPSEEK, further, cluster).fullest.weight_bytes < price(DEEPSEEK, layout, cluster).fullest.weight_bytes
    )


def test_a_token_that_is_sent_once_to_a_node_takes_less_of_the_network() -> None:
    layout = Layout(data=64, expert=64, expert_tensor=1, global_batch=64, shard=1)
    cluster = cluster_of("64xh200")
    often, once = (price(DEEPSEEK, layout, cluster, Software(sends_once=o)).step.expert_s for o in (False, True))
    assert once == pytest.approx(often / 2, rel=0.05)  # of 8 experts, on 4 nodes at most


# -- data sheets of one's own --------------------------------------------------------------------------------------------------


def test_a_data_sheet_of_ones_own_changes_what_it_says(tmp_path: Path) -> None:
    sheet = tmp_path / "mine.toml"
    sheet.write_text(
        'base = "nvidia-h100-sxm"\nname = "mine"\n[power_w]\nvalue = 350\nunit = "W"\ncondition = "limit"\nsource = "rack"\n'
    )
    usual, mine = (price(LLAMA, SHARDED, c) for c in (cluster_of("8xh100-sxm"), cluster_of("8", device=sheet)))
    assert 1.2 < mine.step.total_s / usual.step.total_s < 1.45  # products at 0.71 of the rate, the rest as before
    assert "0.71 of that at 350 of 700 W" in "\n".join(mine.assumptions)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("base = 3.5\n", "no data sheet '3.5'"),
        ('base = "h100"\n', "no data sheet 'h100'; did you mean 'h100-pcie or h100-sxm'"),
        ("speed = 1\n", "has 'speed'; it has base, "),
        (
            'id = "x"\nname = "x"\nvendor = "x"\nkind = "gpu"\n',
            "lacks memory_bytes: give the size of the device's memory",
        ),
        ("id = \n", "is no TOML"),
        ('base = "nvidia-h200"\nlinks = []\n', "lacks links: give what joins devices"),
    ],
)
def test_a_data_sheet_that_is_wrong_says_what_and_the_cure(tmp_path: Path, text: str, words: str) -> None:
    sheet = tmp_path / "mine.toml"
    sheet.write_text(text)
    with pytest.raises(HardwareError, match=words.replace("(", r"\(")):
        cluster_of("8", device=sheet)
    with pytest.raises(HardwareError, match="cannot read the data sheet"):
        cluster_of("8", device=tmp_path / "none.toml")


def test_links_of_a_domain_are_a_tier() -> None:
    rack, pairs = cluster_of("144xgb200"), cluster_of("16xa100-pcie-80gb")
    assert [(tier.name, tier.reach) for tier in rack.tiers] == [("node", 72), ("fabric", 144)]
    assert [(tier.name, tier.reach) for tier in pairs.tiers] == [("node", 2), ("pcie", 8), ("fabric", 16)]


def test_a_cluster_is_read_with_its_tiers(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    tiers = "".join(
        f'[[tiers]]\nname = "{name}"\nreach = {reach}\nbytes_per_s = {rate}\nlatency_s = 5e-6\n'
        for name, reach, rate in (("node", 8, 4.5e11), ("rail", 64, 5e10), ("spine", 512, 1.25e10))
    )
    path.write_text(f'device = "nvidia-h100-sxm"\nnum_devices = 512\n{tiers}')
    assert [tier.reach for tier in read_cluster(path).tiers] == [8, 64, 512]
    path.write_text(f'device = "nvidia-h100-sxm"\nnum_devices = 1024\n{tiers}')
    with pytest.raises(PlanError, match="give them the nearest first, the last to all 1024 devices"):
        read_cluster(path)


# -- software ----------------------------


def test_software_is_named_or_a_file_that_changes_some(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('base = "fsdp1"\nloss_bytes = 10\n')
    software, words = named_software(str(path))
    assert software == structs.replace(PRESETS["fsdp1"].software, loss_bytes=10)
    assert "fsdp1 with loss_bytes = 10" in words
    with pytest.raises(PlanError, match="did you mean 'megatron-core'"):
        named_software("megatron-cor")
    path.write_text('base = "fsdp1"\nspeed = 10\n')
    with pytest.raises(PlanError, match="has 'speed'; software has base, adapted"):
        named_software(str(path))


def test_shares_are_those_of_the_kernels_and_of_the_nearest_heads() -> None:
    spec = load_spec("nvidia-h100-sxm")
    wide, narrow, old, eight = (
        reached_share(spec, "attention", head_width=128),
        reached_share(spec, "attention", head_width=80),
        reached_share(spec, "attention", kernels="triton-2022", head_width=128),
        reached_share(spec, "products", dtype="float8"),
    )
    assert None not in (wide, narrow, old, eight)
    assert wide.share.value > narrow.share.value > old.share.value  # type: ignore[union-attr]
    assert eight.share.condition.startswith("large float8 products")  # type: ignore[union-attr]
    unknown = usual_constants(LLAMA, cluster_of("8xl40s"), Software())
    assert "assumed, nothing is known of nvidia-l40s" in unknown.assumptions[0]
