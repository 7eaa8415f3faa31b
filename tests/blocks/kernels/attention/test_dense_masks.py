"""Attention under a dense mask as one operator: its structure is read as it runs, in graphs without a break."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from flatout import masks
from flatout.blocks.kernels.attention import dense_masks, flash_varlen
from flatout.blocks.kernels.attention.dense_masks import attention_by_dense_mask, when_structure_is_used
from flatout.blocks.kernels.attention.structures import band_of

T = 48
IDS = torch.stack([torch.arange(T) // 20, torch.arange(T) // 13])
DENSE = {
    "documents of samples": (masks.documents(ids=IDS) & masks.causal()).dense(T, T),
    "documents both ways": masks.documents([0, 10, 11, T]).dense(T, T)[0, 0],
    "window": masks.window(7, 2).dense(T, T)[0],
    "causal": masks.causal().dense(T, T),
    "nothing hidden": torch.ones(T, T, dtype=torch.bool),
    "no structure": torch.rand(T, T, generator=torch.Generator().manual_seed(0)) < 0.7 + 0.3 * torch.eye(T),
    "added": torch.linspace(-3, 0, T, dtype=torch.float64).expand(T, T),
}
BANDS = ("documents of samples", "documents both ways", "window", "causal", "nothing hidden")


class Operands(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor


def drawn(*, key_heads: int = 4, dtype: torch.dtype = torch.float64) -> Operands:
    """Tensors that lie in memory as a layer's product and a view of it leave them."""
    generator = torch.Generator().manual_seed(1)
    sizes = ((2, T, heads, 16) for heads in (4, key_heads, key_heads))
    return Operands(
        *(torch.randn(size, generator=generator, dtype=dtype).transpose(1, 2).requires_grad_() for size in sizes)
    )


def with_gradients(attend: Callable[..., Tensor], given: Operands) -> list[Tensor]:
    """The result, the gradients of a loss that weighs each number differently, and their strides."""
    out = attend(*given)
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    return [out.detach(), *torch.autograd.grad((out * weights).sum(), given)]


def plain(mask: Tensor, given: Operands) -> list[Tensor]:
    is_grouped = given.q.size(1) != given.k.size(1)
    return with_gradients(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=is_grouped), given)


class FakeFlash:
    """What PyTorch's FlashAttention on packed tokens computes, document by document, on any device."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, starts: Tensor, _: Tensor, longest: int, *args: Any, **options: Any
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        self.calls.append("forward")
        assert longest == int(starts.diff().max())
        _, _, is_causal, _ = args
        out, lse = self._attend(q, k, v, starts, is_causal, options)
        none = q.new_empty(0)
        return out, lse.float(), none, none, none

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *args: Any, **options: Any
    ) -> Any:
        self.calls.append("backward")
        starts, is_causal = args[0], args[5]
        with torch.enable_grad():
            inputs = [t.detach().requires_grad_() for t in (q, k, v)]
            again, its_lse = self._attend(*inputs, starts, is_causal, options)
            torch.testing.assert_close((again, its_lse.float()), (out, lse))
            return torch.autograd.grad(again, inputs, grad)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, starts: Tensor, is_causal: bool, options: dict[str, Any]) -> Any:
        outs, lses, each = [], [], q.size(1) // k.size(1)
        left, right = options.get("window_size_left", -1), options.get("window_size_right", -1)
        for begin, end in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
            at, place = slice(begin, end), torch.arange(end - begin)
            far = place[None, :] - place[:, None]
            seen = (far <= (0 if is_causal else right if right >= 0 else T)) & (far >= (-left if left >= 0 else -T))
            keys, values = (t[at].repeat_interleave(each, dim=1) for t in (k, v))
            scores = torch.einsum("qhd,khd->hqk", q[at], keys) * options["scale"]
            scores = scores.masked_fill(~seen, -torch.inf)
            outs.append(torch.einsum("hqk,khd->qhd", scores.softmax(dim=-1), values))
            lses.append(scores.logsumexp(dim=-1))
        return torch.cat(outs), torch.cat(lses, dim=1)


@pytest.fixture
def flash(monkeypatch: pytest.MonkeyPatch) -> FakeFlash:
    """FlashAttention's place taken by what computes the same here, for all that it takes on a GPU."""
    fake = FakeFlash()
    monkeypatch.setattr(flash_varlen, "_forward", fake.forward)
    monkeypatch.setattr(flash_varlen, "_backward", fake.backward)
    monkeypatch.setattr(
        flash_varlen, "refusal", lambda q, k, v, *, mask, **_: None if band_of(mask) else "more than a window"
    )
    monkeypatch.setattr(dense_masks, "_structures", dense_masks._Structures())
    return fake


@pytest.mark.parametrize("key_heads", [4, 2])
@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("kind", DENSE)
def test_it_is_torchs_attention(kind: str, is_compiled: bool, key_heads: int, flash: FakeFlash) -> None:
    given, mask = drawn(key_heads=key_heads), DENSE[kind]
    attend = lambda q, k, v: attention_by_dense_mask(q, k, v, mask)  # noqa: E731
    torch._dynamo.reset()
    if is_compiled:
        attend = torch.compile(attend, backend="aot_eager", fullgraph=True)
    found = with_gradients(attend, given)
    for one, other in zip(found, plain(mask, given), strict=True):
        torch.testing.assert_close(one, other)
    assert flash.calls == (["forward", "backward"] if kind in BANDS else [])


@pytest.mark.parametrize("kind", ["documents of samples", "no structure", "added"])
def test_under_autocast_it_is_of_autocasts_type(kind: str) -> None:
    given, mask = drawn(dtype=torch.float32), DENSE[kind]
    mask = mask if mask.dtype == torch.bool else mask.float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = attention_by_dense_mask(*given, mask)
        expected = F.scaled_dot_product_attention(*given, mask)
    assert out.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.slow
def test_a_compiled_model_reads_its_mask_once_a_step_however_it_changes(
    flash: FakeFlash, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mask is written over in place, and reaches attention as a view that the graph makes, which has no version."""
    read: list[Tensor] = []
    monkeypatch.setattr(
        dense_masks._structures, "add", lambda mask, add=dense_masks._structures.add: (read.append(mask), add(mask))[1]
    )

    def model(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        for _ in range(3):
            q = attention_by_dense_mask(q, k, v, mask[:, None]) + q
        return q

    def plain_model(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        for _ in range(3):
            q = F.scaled_dot_product_attention(q, k, v, mask[:, None]) + q
        return q

    given = drawn()
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True)
    mask = DENSE["documents of samples"][:, 0].clone()
    for number, change in enumerate((None, DENSE["causal"][:, 0], DENSE["no structure"], None)):
        if change is not None:
            mask.copy_(change.expand_as(mask))
        found = with_gradients(lambda q, k, v: compiled(q, k, v, mask), given)
        for one, other in zip(found, with_gradients(lambda q, k, v: plain_model(q, k, v, mask), given), strict=True):
            torch.testing.assert_close(one, other)
        assert len(read) == number + 1


def test_structures_of_forward_passes_long_ago_are_read_again(
    flash: FakeFlash, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dense_masks, "_NUM_READ", 2)
    given = drawn()
    kinds = ["documents of samples", "window", "causal", "documents both ways"]
    outs = [attention_by_dense_mask(*given, DENSE[kind]) for kind in kinds]
    for kind, out in zip(kinds, outs, strict=True):
        expected = F.scaled_dot_product_attention(*given, DENSE[kind])
        found = torch.autograd.grad(out.sum(), given)
        for one, other in zip(found, torch.autograd.grad(expected.sum(), given), strict=True):
            torch.testing.assert_close(one, other)


def test_it_tells_when_a_structure_is_used(flash: FakeFlash) -> None:
    told: list[str] = []
    stop = when_structure_is_used(lambda: told.append("used"))
    try:
        attention_by_dense_mask(*drawn(), DENSE["no structure"])
        assert not told
        attention_by_dense_mask(*drawn(), DENSE["window"])
        assert told == ["used"]
    finally:
        stop()
    attention_by_dense_mask(*drawn(), DENSE["window"])
    assert told == ["used"]
