from __future__ import annotations

from typing import Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.blocks.kernels.interpreted import interpreted

from flatout.blocks.kernels.quantised_linear.call import measure_quantised_linear, quantised_linear
from flatout.blocks.kernels.quantised_linear.expand import expand_into
from flatout.blocks.kernels.quantised_linear.packing import PackedWeight, expanded, pack_weight
from flatout.blocks.kernels.quantised_linear.triton import (
    QuantisedProblem,
    QuantisedVariant,
    proposed_variants,
    refusal,
    run_variant,
)
from flatout.core.errors import UsageError

on_device = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")


def drawn(*shape: int, seed: int = 0, by: float = 1.0) -> torch.Tensor:
    return by * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def of_bits(weight: torch.Tensor, bits: int, group: int = 128) -> PackedWeight:
    return PackedWeight(weight, None, 16, group) if bits == 16 else pack_weight(weight, bits=bits, group=group)


@given(st.sampled_from([4, 8]), st.integers(1, 9), st.integers(1, 4), st.sampled_from([32, 128]), st.integers(-30, 30))
def test_what_packing_loses_is_at_most_half_a_scale(
    bits: int, outputs: int, groups: int, group: int, power: int
) -> None:
    weight = drawn(outputs, groups * group, seed=outputs, by=2.0**power)
    packed = pack_weight(weight, bits=bits, group=group)
    back = expanded(packed.codes, packed.scales, bits=bits, group=group, dtype=torch.float64)
    lines = weight.view(outputs, -1, group) if bits == 4 else weight[:, None]
    allowed = lines.abs().amax(-1, keepdim=True).double() * (1 / 14 + 1 / 256 if bits == 4 else 1 / 253)
    assert bool(((back - weight.double()).view_as(lines).abs() <= allowed).all())
    assert packed.num_bytes == outputs * (groups * group // 2 + groups * 2 if bits == 4 else groups * group + 4)


@pytest.mark.parametrize("bits", [4, 8])
def test_a_weight_that_was_packed_is_packed_again_without_loss(bits: Literal[4, 8]) -> None:
    packed = pack_weight(drawn(6, 256), bits=bits)
    back = expanded(packed.codes, packed.scales, bits=bits, dtype=torch.float32)
    again = pack_weight(back, bits=bits)
    assert torch.equal(again.codes, packed.codes)


@pytest.mark.parametrize(
    ("weight", "bits", "says"),
    [
        (torch.ones(4, 100), 4, "no multiple of the group"),
        (torch.ones(4), 8, "1 dimensions"),
        (torch.ones(4, 128), 3, "not of 3"),
        (torch.full((4, 128), float("nan")), 8, "not finite"),
        (torch.ones(4, 128, dtype=torch.long), 8, "torch.int64"),
    ],
)
def test_what_cannot_be_packed_is_said(weight: torch.Tensor, bits: int, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        pack_weight(weight, bits=bits)


WAYS = [
    QuantisedVariant("tiles", 16, 0, 1, 4, 2),
    QuantisedVariant("tiles", 32, 0, 3, 4, 2),
    QuantisedVariant("lanes", 4, 2, 1, 4, 2),
    QuantisedVariant("lanes", 8, 2, 2, 4, 2),
]


@pytest.mark.slow
@pytest.mark.parametrize("variant", WAYS, ids=str)
@pytest.mark.parametrize("bits", [4, 8, 16])
@pytest.mark.parametrize("rows", [1, 5])
def test_every_variant_is_as_exact_as_the_expanded_weight(variant: QuantisedVariant, bits: int, rows: int) -> None:
    if variant.unit == "lanes":
        if rows > 1:
            pytest.skip("lanes are for one row")
        variant = variant._replace(depth=2 if bits == 4 else 128)
    weight, bias = drawn(37, 384).half(), drawn(37, seed=1).half()
    x, packed = drawn(rows, 384, seed=2).half(), of_bits(weight, bits)
    with interpreted():
        y = run_variant(variant, x, packed.codes, packed.scales, bias, bits=bits, group=128)
        again = run_variant(variant, x, packed.codes, packed.scales, bias, bits=bits, group=128)
    wide = expanded(packed.codes, packed.scales, bits=bits, dtype=torch.float64)
    exact = torch.nn.functional.linear(x.double(), wide, bias.double())
    usual = quantised_linear(x, packed, bias)
    assert torch.equal(y, again)
    error, allowed = ((z.double() - exact).norm() / exact.norm() for z in (y, usual))
    assert error <= 2 * allowed + torch.finfo(torch.float16).eps


@pytest.mark.parametrize("bits", [4, 8])
def test_expanding_into_memory_is_expanding(bits: int) -> None:
    from flatout.blocks.kernels.quantised_linear import expand

    packed = pack_weight(drawn(5, 384), bits=bits)
    wanted = expanded(packed.codes, packed.scales, bits=bits, dtype=torch.float16)
    out = torch.empty(5, 384, dtype=torch.float16)
    assert torch.equal(expand_into(out, packed.codes, packed.scales, bits=bits), wanted)
    with interpreted():
        launch = expand._bound.__wrapped__(5, 384, bits)
        made = torch.full_like(out, 7)
        launch(packed.codes, packed.scales, made, 5, 384, bits, 128, expand._BLOCK)
    assert torch.equal(made, wanted)


def test_sizes_that_do_not_meet_are_said() -> None:
    with pytest.raises(UsageError, match="256 inputs"):
        quantised_linear(torch.ones(2, 128), pack_weight(drawn(4, 256), bits=4))


def test_kernels_say_what_they_are_not_for() -> None:
    packed = pack_weight(drawn(4, 256), bits=4)
    x = torch.ones(2, 256)
    assert "float32" in str(refusal(x, packed.codes, packed.scales, bits=4))
    assert "on 'cpu'" in str(refusal(x.half(), packed.codes, packed.scales, bits=4))
    with pytest.raises(UsageError, match="cannot run this"):
        quantised_linear(x, packed, kernel="quantised_linear.triton")
    with pytest.raises(UsageError, match="nothing to measure"):
        measure_quantised_linear(packed, rows=1, dtype=torch.float16)


@pytest.mark.parametrize("bits", [4, 8, 16])
@pytest.mark.parametrize(("n", "k"), [(4096, 4096), (22016, 4096), (4096, 11008), (1024, 8192), (64, 128)])
def test_there_are_ways_for_every_problem(bits: int, n: int, k: int) -> None:
    for m in (1, 8):
        variants = proposed_variants(QuantisedProblem(m, n, k, bits, 128, torch.bfloat16))
        assert variants and all(variant.parts <= k // 128 for variant in variants if variant.unit == "tiles")
        assert len(set(variants)) == len(variants) <= 48


def test_it_compiles_whole() -> None:
    packed = pack_weight(drawn(8, 256), bits=4)
    torch.compiler.reset()
    compiled = torch.compile(lambda x: quantised_linear(x.sin(), packed), fullgraph=True, backend="aot_eager")
    x = drawn(3, 256)
    torch.testing.assert_close(compiled(x), quantised_linear(x.sin(), packed))


@on_device
@pytest.mark.device
@pytest.mark.parametrize("bits", [4, 8, 16])
@pytest.mark.parametrize("rows", [1, 3, 8])
def test_a_device_finds_ways_that_are_right(bits: int, rows: int) -> None:
    packed = of_bits(drawn(1000, 1024).bfloat16().cuda(), bits)
    assert measure_quantised_linear(packed, rows=rows, dtype=torch.bfloat16, seconds=0.2)
