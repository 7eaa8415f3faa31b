from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.blocks.kernels.on_host import on_host

from flatout.blocks.kernels.cached_attention import rope
from flatout.blocks.kernels.cached_attention.rope import reference_rope_decode_attention, rope_decode_attention, run
from flatout.core.errors import UsageError

needs_device = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
FILES = tuple(Path(rope.__file__).parent / "on_device" / name for name in ("heads.cu", "rope_decode.cu"))
KINDS = ("const char*", "const float*", "const float*", "char*", "char*", "const long long*", "char*", "float*")
KINDS = (*KINDS, "unsigned int*", *["int"] * 4, "float")
# batch, heads, heads of keys, places, position
CASES = [
    (1, 2, 2, 130, 0),
    (2, 2, 2, 300, 70),
    (1, 3, 3, 257, 256),
    (2, 4, 2, 192, 150),
    (1, 2, 1, 200, 63),
    (1, 2, 1, 200, 64),
]


def drawn(case: tuple[int, int, int, int, int], device: str = "cpu") -> list[torch.Tensor]:
    batch, heads, groups, places, position = case
    generator = torch.Generator().manual_seed(0)
    shapes = [(batch, (heads + 2 * groups) * 128), (batch, groups, places, 128), (batch, groups, places, 128)]
    qkv, keys, values = (torch.randn(s, generator=generator).bfloat16() for s in shapes)
    angles = torch.arange(places)[:, None] * 1e4 ** -(torch.arange(64) / 64)
    return [t.to(device) for t in (qkv, angles.cos(), angles.sin(), keys, values, torch.tensor([position]))]


def copied(given: list[torch.Tensor], dtype: torch.dtype | None = None) -> list[torch.Tensor]:
    return [t.to(dtype, copy=True) if dtype is not None and t.is_floating_point() else t.clone() for t in given]


def assert_right(given: list[torch.Tensor], kernel: object) -> None:
    """No worse than twice torch's own in bfloat16; the cache gets what torch gives it, and nothing else changes."""
    wide, usual, ours = copied(given, torch.float64), copied(given), copied(given)
    exact, plain, y = reference_rope_decode_attention(*wide), reference_rope_decode_attention(*usual), kernel(*ours)  # type: ignore[operator]
    error, allowed = (float((z.double() - exact).norm() / exact.norm()) for z in (y, plain))
    assert error <= 2 * allowed + 2**-9, (error, allowed)
    for i in (3, 4):
        # A multiply-add rounds once where two operations round twice, which may be seen in a last bit.
        torch.testing.assert_close(ours[i], usual[i], rtol=2**-7, atol=2**-12)
        others = torch.arange(given[3].shape[2], device=given[3].device) != given[5]
        assert torch.equal(ours[i][:, :, others], given[i][:, :, others])


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_kernel_says_what_the_reference_says(
    case: tuple[int, int, int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        rope,
        "_function",
        lambda is_cluster, stages, device: on_host(
            FILES, "rope_decode_attention", (("CLUSTERS", 0), ("STAGES", stages)), KINDS
        ),
    )
    given = drawn(case)
    assert_right(given, run)
    assert torch.equal(run(*copied(given)), run(*copied(given)))
    spoilt = copied(given)
    for t in spoilt[3:5]:
        t[:, :, case[4] :] = float("nan")  # neither what lies behind nor what is at the position is looked at
    assert torch.equal(run(*spoilt), run(*copied(given)))


def test_what_does_not_fit_is_said() -> None:
    qkv, cos, sin, keys, values, position = drawn(CASES[0])
    with pytest.raises(UsageError, match="do not meet"):
        rope_decode_attention(qkv, cos, sin, keys, values[:, :1], position)
    with pytest.raises(UsageError, match="heads of queries"):
        rope_decode_attention(qkv[:, :-3], cos, sin, keys, values, position)
    with pytest.raises(UsageError, match="cosines"):
        rope_decode_attention(qkv, cos[:5], sin, keys, values, position)


def test_it_compiles_whole() -> None:
    given = drawn(CASES[0])
    mine, theirs = copied(given), copied(given)
    torch.compiler.reset()
    compiled = torch.compile(lambda *a: rope_decode_attention(a[0].sin(), *a[1:]), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*mine), rope_decode_attention(theirs[0].sin(), *theirs[1:]))
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


@needs_device
@pytest.mark.device
@pytest.mark.parametrize("case", [*CASES, (1, 32, 32, 1024, 900), (1, 32, 8, 4096, 4095)], ids=str)
def test_a_device_says_it_too(case: tuple[int, int, int, int, int]) -> None:
    given = drawn(case, "cuda")
    with torch.no_grad():
        assert rope.why_no_rope_kernel(*given) is None
        assert_right(given, rope_decode_attention)
        first = rope_decode_attention(*copied(given))
        assert all(torch.equal(first, rope_decode_attention(*copied(given))) for _ in range(20))
