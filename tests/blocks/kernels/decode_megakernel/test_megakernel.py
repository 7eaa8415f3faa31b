from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.blocks.kernels.on_host import on_host

from flatout.blocks.kernels.cached_attention import rope
from flatout.blocks.kernels.decode_megakernel import launch as launching
from flatout.blocks.kernels.decode_megakernel.megakernel import DecodeMegakernel
from flatout.blocks.kernels.quantised_linear import mma
from flatout.blocks.kernels.quantised_linear.mma_packing import MmaPackedWeight, pack_for_mma
from flatout.blocks.kernels.quantised_linear.packing import PackedWeight, pack_weight
from flatout.core.errors import UsageError

pytestmark = pytest.mark.slow

needs_device = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
FILES = (
    Path(mma.__file__).parent / "on_device" / "steps.cu",
    Path(rope.__file__).parent / "on_device" / "heads.cu",
    Path(launching.__file__).parent / "on_device" / "megakernel.cu",
)
KINDS = (
    "const char*",
    "const char*",
    "const long long*",
    "const float*",
    "const float*",
    "word*",
    *["int"] * 4,
)


class Shape:
    """Of a model of two layers: its tensors, and the same in any dtype."""

    def __init__(
        self, bits: int, *, rows: int = 1, heads: int = 2, groups: int = 2, inner: int = 384, places: int = 200,
        position: int = 150, device: str = "cpu",
    ) -> None:  # fmt: skip
        self.rows, self.device = rows, device
        self.generator = torch.Generator().manual_seed(0)
        hidden, self.groups = heads * 128, groups
        sizes = (((heads + 2 * groups) * 128, hidden), (hidden, hidden), (2 * inner, hidden), (hidden, inner))
        self.weights = [[self.weight(n, k, bits, is_gated=i == 2) for i, (n, k) in enumerate(sizes)] for _ in range(2)]
        self.head = self.weight(500, hidden, bits)
        self.norms = [(1 + 0.1 * self.drawn(hidden)).bfloat16() for _ in range(5)]
        self.bias = self.drawn(hidden).bfloat16()
        self.cache = [self.drawn(rows, groups, places, 128).bfloat16() for _ in range(4)]
        angles = torch.arange(places, device=device)[:, None] * 1e4 ** -(torch.arange(64, device=device) / 64)
        self.cosines, self.sines = angles.cos(), angles.sin()
        self.position = torch.tensor([position], device=device)
        self.x = self.drawn(rows, hidden).bfloat16()

    def drawn(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator).to(self.device)

    def weight(self, n: int, k: int, bits: int, *, is_gated: bool = False) -> MmaPackedWeight:
        weight = (self.drawn(n, k) * k**-0.5).bfloat16()
        return pack_for_mma(
            PackedWeight(weight, None, 16, 128) if bits == 16 else pack_weight(weight, bits=bits), is_gated=is_gated
        )

    def megakernel(self, dtype: torch.dtype = torch.bfloat16) -> tuple[DecodeMegakernel, list[torch.Tensor]]:
        """And the caches that it writes."""
        cache = [t.to(dtype, copy=True) for t in self.cache]
        wide = dtype == torch.float64
        megakernel = DecodeMegakernel(rows=self.rows, width=self.x.shape[1],
                                      cosines_SH2=self.cosines.double() if wide else self.cosines,
                      sines_SH2=self.sines.double() if wide else self.sines)  # fmt: skip
        h, norms = megakernel.input, [t.to(dtype) for t in self.norms]
        for i, (qkv, out, gate_up, down) in enumerate(self.weights):
            fresh = megakernel.product(h, qkv, norm=norms[2 * i])
            y = megakernel.attention(fresh, cache[2 * i], cache[2 * i + 1])
            h = megakernel.product(y, out, self.bias.to(dtype), residual=h)
            y = megakernel.product(h, gate_up, norm=norms[2 * i + 1])
            h = megakernel.product(y, down, residual=h)
        megakernel.product(h, self.head, norm=norms[-1])
        return megakernel, cache


def assert_right(shape: Shape, y: torch.Tensor, cache: list[torch.Tensor]) -> None:
    """No worse than twice torch's own operations in bfloat16, which round after each."""
    wide, cache_wide = shape.megakernel(torch.float64)
    exact = wide.one_by_one(shape.x.double(), shape.position)
    plain, cache_plain = shape.megakernel()
    usual = by_reference(plain, shape)
    error, allowed = (float((z.double() - exact).norm() / exact.norm()) for z in (y, usual))
    assert error <= 2 * allowed + 2**-9, (error, allowed)
    for ours, theirs, whole, before in zip(cache, cache_plain, cache_wide, shape.cache, strict=True):
        error, allowed = (float((z.double() - whole).norm() / whole.norm()) for z in (ours, theirs))
        assert error <= 2 * allowed + 2**-9
        others = torch.arange(before.shape[2], device=before.device) != shape.position
        assert torch.equal(ours[:, :, others], before[:, :, others])


def by_reference(megakernel: DecodeMegakernel, shape: Shape) -> torch.Tensor:
    """On any device by torch's own operations."""
    made = [shape.x]
    for step in megakernel.steps:
        if isinstance(step, launching.ProductStep):
            residual = None if step.residual is None else made[step.residual.number]
            made.append(mma.reference_packed_linear(made[step.x.number], step.weight, step.bias, norm=step.norm, eps=step.eps,
                                       residual=residual))  # fmt: skip
        else:
            given = (made[step.qkv.number], shape.cosines, shape.sines, step.keys, step.values, shape.position)
            made.append(rope.reference_rope_decode_attention(*given))
    return made[-1]


SHAPES = [
    {"bits": 4},
    {"bits": 16},
    {"bits": 4, "rows": 2, "heads": 3, "groups": 1, "position": 0},
    {"bits": 16, "rows": 3, "heads": 2, "groups": 1, "inner": 128, "position": 199},
    {"bits": 4, "heads": 1, "groups": 1, "inner": 640, "position": 63},
]


def run_on_host(monkeypatch: pytest.MonkeyPatch, programs: int, warps: int, each: int) -> None:
    def function(bits: int, num_passes: int, depth: int, device: torch.device) -> object:
        return on_host(
            FILES,
            "decode_megakernel",
            tuple(launching.megakernel_constants(bits, num_passes, min(depth, 3)).items()),
            KINDS,
        )

    monkeypatch.setattr(launching, "_WARPS", warps)
    monkeypatch.setattr(launching, "_EACH", each)
    monkeypatch.setattr(launching, "_BEGUN", {4: 2, 16: 2})
    monkeypatch.setattr(launching, "_function", function)
    monkeypatch.setattr(launching, "processors", lambda device: programs)


@pytest.mark.parametrize(("programs", "warps", "each"), [(1, 4, 2), (3, 4, 4), (2, 2, 1)])
@pytest.mark.parametrize("given", SHAPES, ids=str)
@pytest.mark.long
def test_one_launch_says_what_the_steps_say(
    given: dict[str, int], programs: int, warps: int, each: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_on_host(monkeypatch, programs, warps, each)
    shape = Shape(**given)
    megakernel, cache = shape.megakernel()
    launched = launching.MegakernelLaunch(megakernel.steps, shape.rows, megakernel.angles, shape.x.device)
    y = launched(shape.x, shape.position).clone()
    assert_right(shape, y, cache)
    for _ in range(2):  # two sets of words take turns
        assert torch.equal(launched(shape.x, shape.position), y)


@pytest.mark.parametrize("bits", [4, 16])
def test_what_is_no_number_is_handed_on_and_gone_in_the_next_launch(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    run_on_host(monkeypatch, 3, 4, 4)
    shape = Shape(bits, heads=1, groups=1, places=40, position=20)
    megakernel, cache = shape.megakernel()
    launched = launching.MegakernelLaunch(megakernel.steps, 1, megakernel.angles, shape.x.device)
    wrong = shape.x.clone()
    wrong.view(torch.int16)[0, 6:8] = -1  # not a number, all bits set
    assert launched(wrong, shape.position).isnan().all()
    for ours, before in zip(cache, shape.cache, strict=True):
        ours.copy_(before)
    assert_right(shape, launched(shape.x, shape.position), cache)


def test_on_a_cpu_the_steps_run_one_by_one() -> None:
    shape = Shape(4)
    megakernel, cache = shape.megakernel()
    assert megakernel.why_not_one_launch(shape.x) == "kernels in CUDA C run on GPUs, not on 'cpu'"
    y = megakernel(shape.x, shape.position)
    again, _ = shape.megakernel()
    assert torch.equal(y, by_reference(again, shape))
    assert_right(shape, y, cache)


def test_what_does_not_fit_is_said() -> None:
    shape = Shape(4)
    megakernel, _ = shape.megakernel()
    qkv, _out, _gate_up, _ = shape.weights[0]
    with pytest.raises(UsageError, match="does not meet a weight of 384"):
        megakernel.product(megakernel.input, shape.weights[0][3])
    with pytest.raises(UsageError, match="a residual of 256 numbers is not 768"):
        megakernel.product(megakernel.input, qkv, residual=megakernel.input)
    with pytest.raises(UsageError, match="norm must be of 256"):
        megakernel.product(megakernel.input, qkv, norm=torch.ones(3))
    with pytest.raises(UsageError, match=r"not \[1, G, S, H\]"):
        megakernel.attention(megakernel.input, shape.cache[0][0], shape.cache[1])
    with pytest.raises(UsageError, match="heads of queries"):
        megakernel.attention(megakernel.input, shape.cache[0], shape.cache[1])
    with pytest.raises(UsageError, match="together"):
        DecodeMegakernel(rows=1, width=8, cosines_SH2=shape.cosines)
    with pytest.raises(UsageError, match="at least 1"):
        DecodeMegakernel(rows=0, width=8)
    with pytest.raises(UsageError, match="needs the position"):
        megakernel(shape.x)
    with pytest.raises(UsageError, match="needs the position, int64"):
        megakernel(shape.x, shape.position.int())
    with pytest.raises(UsageError, match="is not \\(1, 256\\)"):
        megakernel(shape.x[:, :3], shape.position)
    other = DecodeMegakernel(rows=1, width=256)
    with pytest.raises(UsageError, match="the last step must be a product"):
        other(shape.x)
    with pytest.raises(UsageError, match="needs cosines and sines"):
        other.attention(other.product(other.input, qkv), shape.cache[0], shape.cache[1])


def test_an_attention_is_read_by_the_next_product_alone() -> None:
    shape = Shape(4)
    megakernel = DecodeMegakernel(rows=1, width=256, cosines_SH2=shape.cosines, sines_SH2=shape.sines)
    qkv, out, _, _ = shape.weights[0]
    fresh = megakernel.product(megakernel.input, qkv)
    y = megakernel.attention(fresh, shape.cache[0], shape.cache[1])
    with pytest.raises(UsageError, match="the last step must be a product"):
        megakernel(shape.x, shape.position)
    with pytest.raises(UsageError, match="the step after an attention"):
        megakernel.product(megakernel.input, out)
    with pytest.raises(UsageError, match="the step after an attention"):
        megakernel.attention(fresh, shape.cache[0], shape.cache[1])
    with pytest.raises(UsageError, match="by the product behind it alone"):
        megakernel.product(y, out, residual=y)
    megakernel.product(y, out)
    with pytest.raises(UsageError, match="by the product behind it alone"):
        megakernel.product(megakernel.input, out, residual=y)


def test_why_steps_are_not_one_launch_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "why_not", lambda device: None)
    monkeypatch.setattr(launching, "has_early_launches", lambda device: True)
    shape = Shape(4)
    megakernel, _ = shape.megakernel()
    assert megakernel.why_not_one_launch(shape.x) is None
    assert megakernel.why_not_one_launch(shape.x.float()) == "x is torch.float32, not bfloat16"
    assert "gradients" in str(megakernel.why_not_one_launch(shape.x.float().bfloat16().requires_grad_()))
    wide = DecodeMegakernel(rows=9, width=256)
    wide.product(wide.input, shape.head)
    assert "9 rows" in str(wide.why_not_one_launch(shape.x))
    odd = DecodeMegakernel(rows=2, width=256)
    first = odd.product(odd.input, shape.weight(33, 256, 4))
    odd.product(odd.input, shape.weight(33, 256, 4), residual=first)
    assert odd.why_not_one_launch(shape.x) == "step 1: an odd number of results; programs hand on two at a time"
    mixed = DecodeMegakernel(rows=1, width=256)
    mixed.product(mixed.product(mixed.input, shape.weight(256, 256, 16)), shape.head)
    assert mixed.why_not_one_launch(shape.x) == "weights have different bits"
    strided = DecodeMegakernel(rows=1, width=256)
    strided.product(strided.input, shape.head, norm=torch.ones(512, dtype=torch.bfloat16)[::2])
    assert "not contiguous" in str(strided.why_not_one_launch(shape.x))
    direct = DecodeMegakernel(rows=1, width=768, cosines_SH2=shape.cosines, sines_SH2=shape.sines)
    direct.product(direct.attention(direct.input, shape.cache[0], shape.cache[1]), shape.head)
    assert "an attention of the megakernel's input" in str(direct.why_not_one_launch(shape.x))
    far = Shape(4, heads=1, groups=1, places=64)
    far.cache = [torch.empty((1, 1, 2**20 + 1, 128), dtype=torch.bfloat16, device="meta") for _ in far.cache]
    far.cosines = far.sines = torch.empty((2**20 + 1, 64), device="meta")
    assert "1048577 places; the kernel is for up to 1048576" in str(far.megakernel()[0].why_not_one_launch(far.x))


@needs_device
@pytest.mark.device
@pytest.mark.parametrize("given", [
    *SHAPES,
    {"bits": 4, "heads": 32, "groups": 32, "inner": 11008, "places": 1024, "position": 900},
    {"bits": 16, "heads": 32, "groups": 8, "inner": 4096, "places": 2048, "position": 2047},
    {"bits": 4, "rows": 4, "heads": 16, "groups": 4, "inner": 2048, "places": 512, "position": 300},
    {"bits": 4, "rows": 8, "heads": 8, "groups": 8, "inner": 1024, "places": 128, "position": 77},
], ids=str)  # fmt: skip
def test_a_device_says_it_too(given: dict[str, int]) -> None:
    shape = Shape(**given, device="cuda")
    megakernel, cache = shape.megakernel()
    with torch.no_grad():
        assert megakernel.why_not_one_launch(shape.x) is None
        y = megakernel(shape.x, shape.position).clone()
        assert_right(shape, y, cache)
        for _ in range(20):
            assert torch.equal(megakernel(shape.x, shape.position), y)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = megakernel(shape.x, shape.position)
        for _ in range(20):
            captured.zero_()
            graph.replay()
            assert torch.equal(captured, y)


@needs_device
@pytest.mark.device
@pytest.mark.timeout(60)
@pytest.mark.parametrize("bits", [4, 16])
def test_a_device_hands_on_what_is_no_number(bits: int) -> None:
    shape = Shape(bits, heads=8, groups=8, device="cuda")
    megakernel, cache = shape.megakernel()
    wrong = shape.x.clone()
    wrong.view(torch.int16)[0, 6:8] = -1  # not a number, all bits set
    with torch.no_grad():
        assert megakernel(wrong, shape.position).isnan().all()
        for ours, before in zip(cache, shape.cache, strict=True):
            ours.copy_(before)
        assert_right(shape, megakernel(shape.x, shape.position), cache)
