from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.kernels.on_host import on_host

from flatout.errors import UsageError
from flatout.kernels.cached_attention import turned
from flatout.kernels.chain import launching
from flatout.kernels.chain.chain import Chain
from flatout.kernels.quantised_linear import laid
from flatout.kernels.quantised_linear.laying import Laid, lay
from flatout.kernels.quantised_linear.packing import Packed, pack

needs_device = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
FILES = (
    Path(laid.__file__).parent / "on_device" / "steps.cu",
    Path(turned.__file__).parent / "on_device" / "heads.cu",
    Path(launching.__file__).parent / "on_device" / "chain.cu",
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

    def weight(self, n: int, k: int, bits: int, *, is_gated: bool = False) -> Laid:
        weight = (self.drawn(n, k) * k**-0.5).bfloat16()
        return lay(Packed(weight, None, 16, 128) if bits == 16 else pack(weight, bits=bits), is_gated=is_gated)

    def chain(self, dtype: torch.dtype = torch.bfloat16) -> tuple[Chain, list[torch.Tensor]]:
        """And the caches that it writes."""
        cache = [t.to(dtype, copy=True) for t in self.cache]
        wide = dtype == torch.float64
        chain = Chain(rows=self.rows, width=self.x.shape[1], cosines_SH2=self.cosines.double() if wide else self.cosines,
                      sines_SH2=self.sines.double() if wide else self.sines)  # fmt: skip
        h, norms = chain.given, [t.to(dtype) for t in self.norms]
        for i, (qkv, out, gate_up, down) in enumerate(self.weights):
            fresh = chain.product(h, qkv, norm=norms[2 * i])
            y = chain.attention(fresh, cache[2 * i], cache[2 * i + 1])
            h = chain.product(y, out, self.bias.to(dtype), residual=h)
            y = chain.product(h, gate_up, norm=norms[2 * i + 1])
            h = chain.product(y, down, residual=h)
        chain.product(h, self.head, norm=norms[-1])
        return chain, cache


def assert_right(shape: Shape, y: torch.Tensor, cache: list[torch.Tensor]) -> None:
    """No worse than twice torch's own operations in bfloat16, which round after each."""
    wide, cache_wide = shape.chain(torch.float64)
    exact = wide.one_by_one(shape.x.double(), shape.position)
    plain, cache_plain = shape.chain()
    usual = by_reference(plain, shape)
    error, allowed = (float((z.double() - exact).norm() / exact.norm()) for z in (y, usual))
    assert error <= 2 * allowed + 2**-9, (error, allowed)
    for ours, theirs, whole, before in zip(cache, cache_plain, cache_wide, shape.cache, strict=True):
        error, allowed = (float((z.double() - whole).norm() / whole.norm()) for z in (ours, theirs))
        assert error <= 2 * allowed + 2**-9
        others = torch.arange(before.shape[2], device=before.device) != shape.position
        assert torch.equal(ours[:, :, others], before[:, :, others])


def by_reference(chain: Chain, shape: Shape) -> torch.Tensor:
    """On any device by torch's own operations."""
    made = [shape.x]
    for step in chain.steps:
        if isinstance(step, launching.Product):
            residual = None if step.residual is None else made[step.residual.number]
            made.append(laid.reference(made[step.x.number], step.weight, step.bias, norm=step.norm, eps=step.eps,
                                       residual=residual))  # fmt: skip
        else:
            given = (made[step.qkv.number], shape.cosines, shape.sines, step.keys, step.values, shape.position)
            made.append(turned.reference(*given))
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
        return on_host(FILES, "chain", tuple(launching.constants(bits, num_passes, min(depth, 3)).items()), KINDS)

    monkeypatch.setattr(launching, "_WARPS", warps)
    monkeypatch.setattr(launching, "_EACH", each)
    monkeypatch.setattr(launching, "_BEGUN", {4: 2, 16: 2})
    monkeypatch.setattr(launching, "_function", function)
    monkeypatch.setattr(launching, "processors", lambda device: programs)


@pytest.mark.parametrize(("programs", "warps", "each"), [(1, 4, 2), (3, 4, 4), (2, 2, 1)])
@pytest.mark.parametrize("given", SHAPES, ids=str)
def test_one_launch_says_what_the_steps_say(
    given: dict[str, int], programs: int, warps: int, each: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_on_host(monkeypatch, programs, warps, each)
    shape = Shape(**given)
    chain, cache = shape.chain()
    launched = launching.Launched(chain.steps, shape.rows, chain.angles, shape.x.device)
    y = launched(shape.x, shape.position).clone()
    assert_right(shape, y, cache)
    for _ in range(2):  # two sets of words take turns
        assert torch.equal(launched(shape.x, shape.position), y)


@pytest.mark.parametrize("bits", [4, 16])
def test_what_is_no_number_is_handed_on_and_gone_in_the_next_launch(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    run_on_host(monkeypatch, 3, 4, 4)
    shape = Shape(bits, heads=1, groups=1, places=40, position=20)
    chain, cache = shape.chain()
    launched = launching.Launched(chain.steps, 1, chain.angles, shape.x.device)
    wrong = shape.x.clone()
    wrong.view(torch.int16)[0, 6:8] = -1  # not a number, all bits set
    assert launched(wrong, shape.position).isnan().all()
    for ours, before in zip(cache, shape.cache, strict=True):
        ours.copy_(before)
    assert_right(shape, launched(shape.x, shape.position), cache)


def test_on_a_cpu_the_steps_run_one_by_one() -> None:
    shape = Shape(4)
    chain, cache = shape.chain()
    assert chain.why_not_one_launch(shape.x) == "kernels in CUDA C run on GPUs, not on 'cpu'"
    y = chain(shape.x, shape.position)
    again, _ = shape.chain()
    assert torch.equal(y, by_reference(again, shape))
    assert_right(shape, y, cache)


def test_what_does_not_fit_is_said() -> None:
    shape = Shape(4)
    chain, _ = shape.chain()
    qkv, _out, _gate_up, _ = shape.weights[0]
    with pytest.raises(UsageError, match="does not meet a weight of 384"):
        chain.product(chain.given, shape.weights[0][3])
    with pytest.raises(UsageError, match="a residual of 256 numbers is not 768"):
        chain.product(chain.given, qkv, residual=chain.given)
    with pytest.raises(UsageError, match="norm must be of 256"):
        chain.product(chain.given, qkv, norm=torch.ones(3))
    with pytest.raises(UsageError, match=r"not \[1, G, S, H\]"):
        chain.attention(chain.given, shape.cache[0][0], shape.cache[1])
    with pytest.raises(UsageError, match="heads of queries"):
        chain.attention(chain.given, shape.cache[0], shape.cache[1])
    with pytest.raises(UsageError, match="together"):
        Chain(rows=1, width=8, cosines_SH2=shape.cosines)
    with pytest.raises(UsageError, match="at least 1"):
        Chain(rows=0, width=8)
    with pytest.raises(UsageError, match="needs the position"):
        chain(shape.x)
    with pytest.raises(UsageError, match="needs the position, int64"):
        chain(shape.x, shape.position.int())
    with pytest.raises(UsageError, match="is not \\(1, 256\\)"):
        chain(shape.x[:, :3], shape.position)
    other = Chain(rows=1, width=256)
    with pytest.raises(UsageError, match="ends with a product"):
        other(shape.x)
    with pytest.raises(UsageError, match="needs cosines and sines"):
        other.attention(other.product(other.given, qkv), shape.cache[0], shape.cache[1])


def test_an_attention_is_read_by_the_next_product_alone() -> None:
    shape = Shape(4)
    chain = Chain(rows=1, width=256, cosines_SH2=shape.cosines, sines_SH2=shape.sines)
    qkv, out, _, _ = shape.weights[0]
    fresh = chain.product(chain.given, qkv)
    y = chain.attention(fresh, shape.cache[0], shape.cache[1])
    with pytest.raises(UsageError, match="ends with a product"):
        chain(shape.x, shape.position)
    with pytest.raises(UsageError, match="the step after an attention"):
        chain.product(chain.given, out)
    with pytest.raises(UsageError, match="the step after an attention"):
        chain.attention(fresh, shape.cache[0], shape.cache[1])
    with pytest.raises(UsageError, match="by the product behind it alone"):
        chain.product(y, out, residual=y)
    chain.product(y, out)
    with pytest.raises(UsageError, match="by the product behind it alone"):
        chain.product(chain.given, out, residual=y)


def test_why_steps_are_not_one_launch_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "why_not", lambda device: None)
    monkeypatch.setattr(launching, "has_early_launches", lambda device: True)
    shape = Shape(4)
    chain, _ = shape.chain()
    assert chain.why_not_one_launch(shape.x) is None
    assert chain.why_not_one_launch(shape.x.float()) == "x is torch.float32, not bfloat16"
    assert "gradients" in str(chain.why_not_one_launch(shape.x.float().bfloat16().requires_grad_()))
    wide = Chain(rows=9, width=256)
    wide.product(wide.given, shape.head)
    assert "9 rows" in str(wide.why_not_one_launch(shape.x))
    odd = Chain(rows=2, width=256)
    first = odd.product(odd.given, shape.weight(33, 256, 4))
    odd.product(odd.given, shape.weight(33, 256, 4), residual=first)
    assert odd.why_not_one_launch(shape.x) == "step 1: an odd number of results; programs hand on two at a time"
    mixed = Chain(rows=1, width=256)
    mixed.product(mixed.product(mixed.given, shape.weight(256, 256, 16)), shape.head)
    assert mixed.why_not_one_launch(shape.x) == "weights have different bits"
    strided = Chain(rows=1, width=256)
    strided.product(strided.given, shape.head, norm=torch.ones(512, dtype=torch.bfloat16)[::2])
    assert "not contiguous" in str(strided.why_not_one_launch(shape.x))
    direct = Chain(rows=1, width=768, cosines_SH2=shape.cosines, sines_SH2=shape.sines)
    direct.product(direct.attention(direct.given, shape.cache[0], shape.cache[1]), shape.head)
    assert "an attention of what the chain is given" in str(direct.why_not_one_launch(shape.x))
    far = Shape(4, heads=1, groups=1, places=64)
    far.cache = [torch.empty((1, 1, 2**20 + 1, 128), dtype=torch.bfloat16, device="meta") for _ in far.cache]
    far.cosines = far.sines = torch.empty((2**20 + 1, 64), device="meta")
    assert "1048577 places; the kernel is for up to 1048576" in str(far.chain()[0].why_not_one_launch(far.x))


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
    chain, cache = shape.chain()
    with torch.no_grad():
        assert chain.why_not_one_launch(shape.x) is None
        y = chain(shape.x, shape.position).clone()
        assert_right(shape, y, cache)
        for _ in range(20):
            assert torch.equal(chain(shape.x, shape.position), y)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = chain(shape.x, shape.position)
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
    chain, cache = shape.chain()
    wrong = shape.x.clone()
    wrong.view(torch.int16)[0, 6:8] = -1  # not a number, all bits set
    with torch.no_grad():
        assert chain(wrong, shape.position).isnan().all()
        for ours, before in zip(cache, shape.cache, strict=True):
            ours.copy_(before)
        assert_right(shape, chain(shape.x, shape.position), cache)
