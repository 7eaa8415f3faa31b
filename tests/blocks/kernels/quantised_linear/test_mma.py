from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.blocks.kernels.on_host import OnHost, on_host

from flatout.blocks.kernels.quantised_linear import mma
from flatout.blocks.kernels.quantised_linear.mma import (
    CUTS,
    MmaCut,
    mma_constants,
    packed_linear,
    reference_packed_linear,
    run_cut,
)
from flatout.blocks.kernels.quantised_linear.mma_packing import MmaPackedWeight, pack_for_mma, unpack_from_mma
from flatout.blocks.kernels.quantised_linear.packing import PackedWeight, pack_weight
from flatout.core.errors import UsageError

needs_device = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
FILES = tuple(Path(mma.__file__).parent / "on_device" / name for name in ("steps.cu", "streamed.cu"))
KINDS = ("const char*", "const char*", "const char*", "const char*", *["const unsigned short*"] * 2, "unsigned short*")
KINDS = (*KINDS, "int", "int", "int", "float")


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def weight_of(outputs: int, inputs: int, bits: int, *, is_gated: bool = False, device: str = "cpu") -> MmaPackedWeight:
    weight = drawn(outputs, inputs).bfloat16().to(device)
    return pack_for_mma(
        PackedWeight(weight, None, 16, 128) if bits == 16 else pack_weight(weight, bits=4), is_gated=is_gated
    )


@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("bits", [4, 16])
@pytest.mark.parametrize(("outputs", "inputs"), [(24, 256), (32, 384), (50, 128)])
def test_packing_is_undone_exactly(outputs: int, inputs: int, bits: int, is_gated: bool) -> None:
    weight = drawn(outputs, inputs).bfloat16()
    packed = PackedWeight(weight, None, 16, 128) if bits == 16 else pack_weight(weight, bits=4)
    back = unpack_from_mma(pack_for_mma(packed, is_gated=is_gated))
    assert torch.equal(back.codes, packed.codes)
    assert bits == 16 or torch.equal(back.scales, packed.scales)


def test_what_cannot_be_packed_is_an_error() -> None:
    with pytest.raises(UsageError, match="it has 8 bits"):
        pack_for_mma(pack_weight(drawn(16, 128), bits=8))
    with pytest.raises(UsageError, match="groups are of 32"):
        pack_for_mma(pack_weight(drawn(16, 128), bits=4, group=32))
    with pytest.raises(UsageError, match="not bfloat16"):
        pack_for_mma(PackedWeight(drawn(16, 128), None, 16, 128))
    with pytest.raises(UsageError, match="200 inputs"):
        pack_for_mma(PackedWeight(drawn(16, 200).bfloat16(), None, 16, 128))
    with pytest.raises(UsageError, match="17 outputs"):
        pack_for_mma(PackedWeight(drawn(17, 128).bfloat16(), None, 16, 128), is_gated=True)


def test_sizes_that_do_not_meet_are_said() -> None:
    weight = weight_of(16, 128, 4)
    with pytest.raises(UsageError, match="128 inputs"):
        packed_linear(torch.ones(2, 64), weight)
    with pytest.raises(UsageError, match="residual"):
        packed_linear(torch.ones(2, 128), weight, residual=torch.ones(2, 128))
    with pytest.raises(UsageError, match="norm must be of 128"):
        packed_linear(torch.ones(2, 128), weight, norm=torch.ones(16))


def inputs_of(weight: MmaPackedWeight, rows: int, device: str = "cpu") -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    width = weight.outputs // 2 if weight.is_gated else weight.outputs
    around = {
        "norm": 1 + 0.1 * drawn(weight.inputs, seed=2),
        "bias": drawn(width, seed=3),
        "residual": drawn(rows, width, seed=4),
    }
    return drawn(rows, weight.inputs, seed=1).bfloat16().to(device), {
        k: t.bfloat16().to(device) for k, t in around.items()
    }


def assert_right(y: torch.Tensor, x: torch.Tensor, weight: MmaPackedWeight, around: dict[str, torch.Tensor]) -> None:
    """No worse than twice torch's own operations in bfloat16, which round after each."""
    exact = reference_packed_linear(x.double(), weight, **{k: t.double() for k, t in around.items()})
    usual = reference_packed_linear(x, weight, **around)
    error, allowed = (float((z.double() - exact).norm() / exact.norm()) for z in (y, usual))
    assert error <= 2 * allowed + 2**-9, (error, allowed)


def function_on_host(cut: MmaCut, num_passes: int, bits: int, is_gated: bool, device: torch.device) -> OnHost:
    return on_host(FILES, "packed_linear", tuple(mma_constants(cut, num_passes, bits, is_gated).items()), KINDS)


@pytest.mark.slow
@pytest.mark.parametrize(("cut", "rows", "shape"), [
    (MmaCut(2, 2, 1), 1, (140, 640)),
    (MmaCut(4, 1, 1), 3, (100, 384)),
    (MmaCut(1, 4, 1), 8, (16, 128)),
    (MmaCut(4, 2, 2), 1, (24, 256)),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("bits", [4, 16])
@pytest.mark.parametrize("form", ["alone", "all"])
def test_the_kernel_says_what_the_reference_says(
    cut: MmaCut, rows: int, shape: tuple[int, int], bits: int, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mma, "_function", function_on_host)
    weight = weight_of(*shape, bits, is_gated=form == "all")
    x, around = inputs_of(weight, rows)
    around = around if form == "all" else {}
    y = run_cut(cut, x, weight, **around)
    assert torch.equal(y, run_cut(cut, x, weight, **around))
    assert_right(y, x, weight, around)


@pytest.mark.slow
def test_numbers_far_below_the_largest_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mma, "_function", function_on_host)
    wide = drawn(16, 256)
    wide[:, 7] = 0
    weight = pack_for_mma(pack_weight(wide, bits=4))
    x = drawn(1, 256).bfloat16()
    y = run_cut(MmaCut(2, 2, 1), x, weight)
    x[0, 7] = 2.0**13
    assert torch.equal(run_cut(MmaCut(2, 2, 1), x, weight), y)
    exact = reference_packed_linear(x.double(), weight)
    assert float((y.double() - exact).norm() / exact.norm()) < 2**-8


@pytest.mark.slow
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_is_not_hidden(value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mma, "_function", function_on_host)
    weight = weight_of(16, 256, 4)
    x = drawn(3, 256).bfloat16()
    x[1, 5] = value
    y = run_cut(MmaCut(2, 2, 1), x, weight)
    assert y[1].isnan().all()
    assert_right(y[::2], x[::2], weight, {})


@pytest.mark.slow
def test_rows_that_do_not_fit_at_once_come_in_two_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mma, "_function", function_on_host)
    weight = weight_of(16, 4096, 4)
    x, around = inputs_of(weight, 8)
    assert not mma.fitting_cuts(8, weight, x.device)
    assert mma.fitting_cuts(1, weight, x.device)[0] == CUTS[0]
    y = mma._on_device(x, *weight, around["bias"], around["norm"], 1e-5, around["residual"])
    assert_right(y, x, weight, around)
    halves = [mma._on_device(x[i : i + 4], *weight, around["bias"], around["norm"], 1e-5, around["residual"][i : i + 4])
              for i in (0, 4)]  # fmt: skip
    assert torch.equal(y, torch.cat(halves))


@pytest.mark.slow
def test_it_compiles_whole() -> None:
    weight = weight_of(16, 256, 4)
    x, around = inputs_of(weight, 2)
    torch.compiler.reset()
    compiled = torch.compile(lambda x: packed_linear(x.sin(), weight, **around), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), packed_linear(x.sin(), weight, **around))


@needs_device
@pytest.mark.device
@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize("bits", [4, 16])
@pytest.mark.parametrize("rows", [1, 5, 8])
@pytest.mark.parametrize("is_gated", [False, True])
def test_a_device_says_it_too(cut: MmaCut, bits: int, rows: int, is_gated: bool) -> None:
    weight = weight_of(1000, 2816, bits, is_gated=is_gated, device="cuda")
    x, around = inputs_of(weight, rows, "cuda")
    with torch.no_grad():
        for some in ({}, {"norm": around["norm"]}, around):
            y = run_cut(cut, x, weight, **some)
            assert_right(y, x, weight, some)
            assert all(torch.equal(y, run_cut(cut, x, weight, **some)) for _ in range(20))


@needs_device
@pytest.mark.device
def test_a_device_takes_rows_that_do_not_fit_at_once_in_halves() -> None:
    weight = weight_of(256, 11008, 4, device="cuda")
    x, around = inputs_of(weight, 8, "cuda")
    assert not mma.fitting_cuts(8, weight, x.device)
    with torch.no_grad():
        assert_right(packed_linear(x, weight, **around), x, weight, around)


@needs_device
@pytest.mark.device
def test_launches_that_overlap_see_what_came_before() -> None:
    weights = [weight_of(2048, 2048, 4, device="cuda") for _ in range(3)]
    norm = torch.ones(2048, dtype=torch.bfloat16, device="cuda")

    def megakernel(x: torch.Tensor) -> torch.Tensor:
        for i in range(30):
            x = packed_linear(x, weights[i % 3], norm=norm, residual=x)
        return x

    with torch.no_grad():
        x = drawn(1, 2048).bfloat16().cuda()
        wanted = x
        for i in range(30):
            wanted = packed_linear(wanted, weights[i % 3], norm=norm, residual=wanted)
            wanted.sum().item()  # so that no launch begins before the one before it has ended
        assert torch.equal(megakernel(x), wanted)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            made = megakernel(x)
        for _ in range(50):
            graph.replay()
            assert torch.equal(made, wanted)
