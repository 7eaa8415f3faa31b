"""`flatout.attention` against float64: every mask and score, forward and backward, no worse than plain attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import flatout
from flatout import NotFused, UsageError, masks, scores
from flatout.blocks.kernels.attention.api import attention_selection
from flatout.blocks.kernels.attention.mask import Mask
from flatout.blocks.kernels.attention.pieces import pieces_of
from flatout.blocks.kernels.attention.reference import reference_attention as plain
from flatout.blocks.kernels.attention.scores import Score

B, H, S = 2, 4, 203


def _graph(length: int) -> Mask:
    near = torch.rand(length, length, generator=torch.Generator().manual_seed(1)) < 0.05
    row, col = near.nonzero().unbind(1)
    return masks.graph(torch.cat([row.new_zeros(1), row.bincount(minlength=length).cumsum(0)]), col)


MASKS: dict[str, Callable[[], Mask | None]] = {
    "no mask": lambda: None,
    "causal": masks.causal,
    "window": lambda: masks.window(17),
    "window both ways": lambda: masks.window(9, 30),
    "window by head": lambda: masks.causal() & masks.window(torch.tensor([[3, 30, 300, 0]])),
    "documents": lambda: masks.documents([0, 1, 70, 71, 150, S]),
    "documents, causal": lambda: masks.documents([0, 1, 70, 71, 150, S]) & masks.causal(),
    "documents, window": lambda: masks.documents([0, 70, S]) & masks.window(20),
    "documents by sample": lambda: masks.documents(ids=torch.arange(S).expand(2, S) // torch.tensor([[30], [50]])),
    "scattered documents": lambda: masks.documents(ids=torch.arange(S) % 3) & masks.causal(),
    "prefix": lambda: masks.causal() | masks.prefix(90),
    "prefix by sample": lambda: masks.causal() | masks.prefix(torch.tensor([[10], [150]])),
    "sinks": lambda: (masks.window(20) | masks.sinks(3)) & masks.causal(),
    "global": lambda: masks.global_tokens(torch.arange(S) % 50 == 7) | masks.window(9, 9),
    "dilated": lambda: masks.dilated(3) & masks.causal(),
    "blocks": lambda: masks.blocks(torch.rand(21, 21, generator=torch.Generator().manual_seed(2)) < 0.3, 10),
    "tree": lambda: masks.tree([-1, *((7 * i) % (i + 1) for i in range(S - 1))]),
    "graph": lambda: _graph(S) | masks.window(0, 0),
    "per head": lambda: masks.per_head([masks.causal(), masks.window(9), masks.sinks(3), masks.everything()]),
    "custom": lambda: masks.custom(lambda b, h, q, kv: (q * 7 + kv * 3 + h) % 11 < 4, heads=H),
    "rows that see nothing": lambda: masks.causal() & ~masks.sinks(80),
    "nothing": lambda: ~masks.everything(),
}

TABLE = torch.randn(H, 2 * 40 + 1, generator=torch.Generator().manual_seed(3))
SCORES: dict[str, Callable[[Tensor], Score | None]] = {
    "plain": lambda table: None,
    "softcap": lambda table: scores.softcap(3.0),
    "softcap by sigmoid": lambda table: scores.softcap(3.0, form="sigmoid"),
    "alibi": lambda table: scores.alibi(scores.alibi_slopes(H).to(table)),
    "learned bias": scores.relative_bias,
    "softcap and learned bias": lambda table: scores.softcap(3.0) >> scores.relative_bias(table),
    "custom": lambda table: scores.custom(lambda score, b, h, q, kv, t: score * t[h, kv % 80] + 0.1 * score**2, table),
}


class Inputs(NamedTuple):
    """Queries, keys, values, the table of biases, and the gradient of the result. Drawn on the CPU, whatever they are sent to."""

    q: Tensor
    k: Tensor
    v: Tensor
    table: Tensor
    grad: Tensor

    def to(self, dtype: torch.dtype | torch.device) -> Inputs:
        """Leaves of their own."""
        return Inputs(*(t.detach().to(dtype) for t in self))


def drawn(*, width: int = 32, key_heads: int = H, length: int = S, dtype: torch.dtype = torch.float32) -> Inputs:
    generator = torch.Generator().manual_seed(0)
    shapes = [(B, length, n, width) for n in (H, key_heads, key_heads)]
    q, k, v = (torch.randn(shape, generator=generator).transpose(1, 2).to(dtype) for shape in shapes)
    return Inputs(q, k, v, TABLE.to(dtype), torch.randn(B, H, length, width, generator=generator).to(dtype))


def outcome(attend: Callable[..., Tensor], given: Inputs, score: Callable[[Tensor], Score | None]) -> list[Tensor]:
    """The result and the gradients of queries, keys, values and, where it is used, the table."""
    wanted = [t.requires_grad_() for t in given[:4]]
    made = score(given.table)
    out = attend(given.q, given.k, given.v, score=made)
    is_learned = made is not None and any(t is given.table for t in made.tensors)
    return [out, *torch.autograd.grad(out, wanted if is_learned else wanted[:3], given.grad)]


def off(found: list[Tensor], exact: list[Tensor]) -> list[float]:
    """The norm of the difference over that of what is exact; of a gradient that is 0, over the largest norm of all."""
    most = max(e.norm().item() for e in exact)
    return [
        (f.double() - e).norm().item() / max(e.norm().item(), 1e-30 if e.any() else most, 1e-30)
        for f, e in zip(found, exact, strict=True)
    ]


def assert_no_worse_than_plain(given: Inputs, mask: Mask | None, score: Callable[[Tensor], Score | None]) -> None:
    dtype, scale = given.q.dtype, 0.25
    whole = masks.everything() if mask is None else mask

    def ours(q: Tensor, k: Tensor, v: Tensor, *, score: Score | None) -> Tensor:
        return flatout.attention(q, k, v, mask=mask, score=score, scale=scale, enable_gqa=True)

    def theirs(q: Tensor, k: Tensor, v: Tensor, *, score: Score | None) -> Tensor:
        return plain(q, k, v, mask=whole, score=score, scale=scale)

    exact = outcome(theirs, given.to(torch.float64), score)
    usual = off(outcome(theirs, given.to(dtype), score), exact)
    found = off(outcome(ours, given.to(dtype), score), exact)

    # rounding of one result or gradient to the dtype is the least that anything can be off, and of what a gradient subtracts
    floor = 4 * torch.finfo(dtype).eps
    lost = cancellation(given.to(torch.float64), whole, score, scale)
    floors = [floor, lost * floor, lost * floor, floor, lost * floor]
    assert all(f <= 2 * u + least for f, u, least in zip(found, usual, floors, strict=False)), (found, usual, floors)


def cancellation(given: Inputs, mask: Mask, score: Callable[[Tensor], Score | None], scale: float) -> float:
    """How much larger than their difference the two terms are that the gradients of scores subtract.

    One kernel that never holds a row of scores sums both by themselves (P dP and P D in algorithm 4 of Dao and others, 2022); the
    softmax's own backward rounds both alike, so that they cancel exactly where a row sees one key.
    """
    eye = torch.eye(given.k.shape[2], dtype=given.k.dtype, device=given.k.device).expand(*given.k.shape[:3], -1)
    weights, out = (
        plain(given.q, given.k, v, mask=mask, score=score(given.table), scale=scale) for v in (eye, given.v)
    )
    values = given.v.repeat_interleave(given.q.shape[1] // given.v.shape[1], 1)
    one, two = given.grad @ values.mT, (given.grad * out).sum(-1, keepdim=True)
    terms, difference = (weights * (one.abs() + two.abs())).norm().item(), (weights * (one - two)).norm().item()
    return (
        terms / difference if difference > 1e-9 * terms else 1.0
    )  # where all cancels, `off` judges by the largest gradient


@pytest.mark.slow
@pytest.mark.parametrize("mask", MASKS)
def test_every_mask_is_no_worse_than_plain_attention(mask: str) -> None:
    assert_no_worse_than_plain(drawn(), MASKS[mask](), SCORES["plain"])


@pytest.mark.slow
@pytest.mark.parametrize("score", list(SCORES)[1:])
@pytest.mark.parametrize("mask", ["no mask", "documents, causal", "window by head", "graph", "rows that see nothing"])
def test_every_score_is_no_worse_than_plain_attention(mask: str, score: str) -> None:
    assert_no_worse_than_plain(drawn(), MASKS[mask](), SCORES[score])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("width", [32, 48, 64, 128])
@pytest.mark.parametrize("key_heads", [1, 2, 4])
def test_widths_and_grouped_keys_and_dtypes(width: int, key_heads: int, dtype: torch.dtype) -> None:
    given = drawn(width=width, key_heads=key_heads, dtype=dtype)

    assert_no_worse_than_plain(given, MASKS["documents, causal"](), SCORES["plain"])
    assert_no_worse_than_plain(given, MASKS["sinks"](), SCORES["softcap"])


@pytest.mark.slow
@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 192, 193, 700])
def test_odd_lengths(length: int) -> None:
    given = drawn(length=length)

    for mask in (masks.causal(), masks.window(70), masks.causal() | masks.prefix(length // 2), masks.dilated(2)):
        assert_no_worse_than_plain(given, mask, SCORES["plain"])


def test_values_may_have_another_width_and_keys_another_length() -> None:
    q, k, v = torch.randn(1, 2, 30, 16), torch.randn(1, 2, 50, 16), torch.randn(1, 2, 50, 24)

    out = flatout.attention(q, k, v, mask=masks.window(5, 20))

    exact = plain(q.double(), k.double(), v.double(), mask=masks.window(5, 20), score=None, scale=0.25)
    assert out.shape == (1, 2, 30, 24)
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-5)


def test_a_row_that_sees_nothing_is_zero_and_has_no_gradient() -> None:
    given = drawn().to(torch.float32)
    q = given.q.requires_grad_()

    out = flatout.attention(q, given.k, given.v, mask=masks.causal() & ~masks.sinks(80))
    (grad,) = torch.autograd.grad(out.sum(), q)

    assert not out[:, :, :80].any() and not grad[:, :, :80].any()
    assert bool((out[:, :, 80:] != 0).any()) and bool(grad.isfinite().all())


def test_the_choice_says_what_runs_and_why_before_anything_does() -> None:
    given = drawn()

    choice = attention_selection(given.q, given.k, given.v, mask=masks.causal())

    assert choice.kernel.id == "attention.pieces"
    assert str(choice).splitlines() == [
        "attention.pieces: torch's CPU kernel on the blocks that are seen, joined by log-sum-exp",
        "  not attention.cudnn: the tensors are on cpu",
    ]


def test_what_no_kernel_takes_is_refused_with_every_reason() -> None:
    q = torch.zeros(1, 1, 4, 16, dtype=torch.complex64)

    with pytest.raises(
        NotFused, match=r"complex64.*attention.cudnn: the tensors are on cpu.*attention.pieces: torch.complex64 is"
    ):
        flatout.attention(q, q, q)


@pytest.mark.parametrize(
    ("shapes", "options", "what"),
    [
        ([(2, 4, 8), (2, 4, 8), (2, 4, 8)], {}, "give .batch, heads, tokens, width."),
        ([(1, 4, 8, 16), (1, 2, 8, 16), (1, 2, 8, 16)], {}, "with enable_gqa=True"),
        ([(1, 4, 8, 16), (1, 3, 8, 16), (1, 3, 8, 16)], {"enable_gqa": True}, "a multiple"),
        ([(1, 4, 8, 16), (1, 4, 8, 32), (1, 4, 8, 16)], {}, "queries and keys in width"),
        ([(1, 4, 8, 16), (1, 4, 9, 16), (1, 4, 8, 16)], {}, "keys and values in heads and tokens"),
        ([(1, 4, 8, 16)] * 3, {"mask": masks.per_head([masks.causal()] * 3)}, "of 3 heads, and there are 4"),
        ([(1, 4, 8, 16)] * 3, {"mask": masks.documents([0, 9])}, "is of 9 tokens"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(
    shapes: list[tuple[int, ...]], options: dict[str, object], what: str
) -> None:
    q, k, v = (torch.zeros(shape) for shape in shapes)

    with pytest.raises(UsageError, match=what):
        flatout.attention(q, k, v, **options)  # type: ignore[arg-type]


def test_a_score_whose_tensors_are_elsewhere_is_refused() -> None:
    q = torch.zeros(1, 1, 4, 16)

    with pytest.raises(UsageError, match="a tensor of alibi is on meta"):
        flatout.attention(q, q, q, score=scores.alibi(torch.ones(1, device="meta")))


def test_mixed_dtypes_are_refused() -> None:
    q = torch.zeros(1, 1, 4, 16)

    with pytest.raises(UsageError, match="one dtype and device"):
        flatout.attention(q, q.bfloat16(), q.bfloat16())


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda: scores.softcap(0.0), "cap is 0"),
        (lambda: scores.softcap(1.0, form="fast"), "exact, sigmoid, hardware"),  # type: ignore[arg-type]
        (lambda: scores.alibi(torch.zeros(2, 2)), "one floating-point number a head"),
        (lambda: scores.relative_bias(torch.zeros(2, 4)), "2 D . 1"),
    ],
)
def test_scores_that_are_none_are_refused(make: Callable[[], Score], what: str) -> None:
    with pytest.raises(UsageError, match=what):
        make()


@pytest.mark.parametrize("form", ["sigmoid", "hardware"])
@pytest.mark.slow
def test_other_forms_of_softcap_are_the_same_function_off_the_gpu(form: scores.Form) -> None:
    raw = torch.linspace(-30, 30, 4001, dtype=torch.float64).requires_grad_()
    none = torch.zeros(())
    exact = scores.softcap(5.0).function(raw, none, none, none, none)

    other = scores.softcap(5.0, form=form).function(raw, none, none, none, none)

    torch.testing.assert_close(other, exact, rtol=0, atol=5.0 * 2**-50)
    grads = [torch.autograd.grad(value.sum(), raw)[0] for value in (exact, other)]
    torch.testing.assert_close(grads[1], grads[0], rtol=0, atol=2**-48)
    narrow = scores.softcap(5.0, form=form).function(raw.float(), none, none, none, none)
    assert (narrow.double() - exact).abs().max().item() <= 5.0 * 2**-21


def test_pieces_compute_few_more_pairs_than_are_seen() -> None:
    length = 4096
    observed = {
        "causal": (masks.causal(), length * (length + 1) // 2),
        "documents": (masks.documents(list(range(0, length + 1, 256))), length * 256),
        "documents, causal": (masks.documents(list(range(0, length + 1, 256))) & masks.causal(), length * 257 // 2),
        "window": (masks.window(511), length * 512),
        "prefix": (masks.causal() | masks.prefix(1000), length * (length + 1) // 2 + 1000 * 999 // 2),
    }

    for name, (mask, pairs) in observed.items():
        pieces = pieces_of(mask, length, length)
        # a causal square counts whole here, though the kernel skips half of it
        computed = sum(
            (piece.end - piece.begin) * (hi - lo) - (hi - lo) * (hi - lo - 1) // 2 * part.is_causal
            for _, _, some in pieces
            for piece in some
            for part in piece.parts
            for lo, hi in part.runs
        )
        assert pairs * 0.98 <= computed <= 1.5 * pairs, name


@pytest.mark.slow
@pytest.mark.parametrize("score", [None, scores.softcap(5.0)], ids=["plain", "softcap"])
def test_memory_grows_with_the_length_and_not_with_its_square(score: Score | None) -> None:
    peaks = []
    for length in (2048, 8192):
        q, k, v = (torch.randn(1, 2, length, 32, requires_grad=True) for _ in range(3))
        mask = masks.window(255) & masks.documents(list(range(0, length + 1, 512)))
        with flatout.expect() as observed:
            flatout.attention(q, k, v, mask=mask, score=score).sum().backward()
        assert observed.peak_bytes is not None
        peaks.append(observed.peak_bytes)

    assert peaks[1] < 4.5 * peaks[0]
    assert peaks[1] < 8192 * 8192  # one byte for each pair would be more


def test_a_mask_is_taken_apart_once_for_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    import flatout.blocks.kernels.attention.sparse_cpu as kernel

    made = []
    monkeypatch.setattr(kernel, "pieces_of", lambda *args, **kwargs: made.append(args) or pieces_of(*args, **kwargs))
    given, mask = drawn(), masks.window(5)

    for _ in range(3):
        flatout.attention(given.q, given.k, given.v, mask=mask)

    assert len(made) == 1
