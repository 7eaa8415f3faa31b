"""cuDNN on documents behind one another: what it is asked for, with its place taken by what computes the same on a CPU."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.blocks.kernels.attention.fake_cudnn import FakeCudnn
from torch import Tensor

import flatout
from flatout import masks
from flatout.blocks.kernels.attention import cudnn_plans, cudnn_varlen, varlen
from flatout.blocks.kernels.attention.flash_varlen import flash_backward, flash_forward
from flatout.blocks.kernels.attention.spans import SpanOptions, Spans


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCudnn]:
    """The front end's place taken, for tokens on a CPU."""
    found = FakeCudnn()
    caches: list[Any] = [
        cudnn_varlen._forward_plan,
        cudnn_varlen._backward_plan,
        cudnn_varlen._version,
        cudnn_plans._handle,
    ]
    monkeypatch.setitem(sys.modules, "cudnn", found)
    monkeypatch.setattr(cudnn_varlen, "has_cudnn", lambda: True)
    monkeypatch.setattr(
        cudnn_plans, "cudnn_type", lambda dtype: {torch.int32: "INT32", torch.int64: "INT64"}.get(dtype, "FLOAT")
    )
    for each in caches:
        each.cache_clear()
    yield found
    for each in caches:
        each.cache_clear()


def drawn(num_tokens: int, key_heads: int = 4) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = [(num_tokens, heads, 16) for heads in (4, key_heads, key_heads, 4)]
    return [torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes]


def options_of(lengths: list[int], left: int | None = None, right: int | None = 0) -> SpanOptions:
    offsets = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    return SpanOptions(Spans(offsets, max(lengths)), left, right, 0.3)


def exact(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, options: SpanOptions) -> list[Tensor]:
    """Result and gradients of attention under the mask written out."""
    place = torch.arange(q.size(0))
    document = torch.bucketize(place, options.spans.offsets[1:].long(), right=True)
    far = place[None, :] - place[:, None]
    seen = document[:, None] == document[None, :]
    seen &= (far >= -options.left) if options.left is not None else True
    seen &= (far <= options.right) if options.right is not None else True
    inputs = [t.clone().requires_grad_() for t in (q, k, v)]
    out = torch.nn.functional.scaled_dot_product_attention(
        *(t.transpose(0, 1) for t in inputs), seen, scale=options.scale, enable_gqa=True
    ).transpose(0, 1)
    return [out.detach(), *torch.autograd.grad(out, inputs, grad)]


@pytest.mark.parametrize("key_heads", [4, 2])
@pytest.mark.parametrize(("left", "right"), [(None, 0), (None, None), (5, 0)])
def test_results_and_gradients_are_those_under_the_mask_written_out(
    fake: FakeCudnn, left: int | None, right: int | None, key_heads: int
) -> None:
    q, k, v, grad = drawn(128, key_heads)
    q, k = torch.cat([q, k], dim=1).split([4, key_heads], dim=1)  # as one product leaves them
    options = options_of([1, 40, 3, 60, 24], left, right)

    out, stats = cudnn_varlen.cudnn_forward(q, k, v, options)
    grads = cudnn_varlen.cudnn_backward(grad.transpose(0, 1).contiguous().transpose(0, 1), q, k, v, out, stats, options)

    assert stats.shape == (4, 128)
    for one, other in zip((out, *grads), exact(q, k, v, grad, options), strict=True):
        torch.testing.assert_close(one, other)
    assert fake.built == ["forward", "backward"]


@settings(max_examples=25, deadline=None)
@given(cuts=st.lists(st.integers(1, 255), max_size=12, unique=True))
def test_plans_are_few_however_documents_change(cuts: list[int]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        fake = FakeCudnn()
        patch.setitem(sys.modules, "cudnn", fake)
        patch.setattr(
            cudnn_plans, "cudnn_type", lambda dtype: {torch.int32: "INT32", torch.int64: "INT64"}.get(dtype, "FLOAT")
        )
        cudnn_varlen._forward_plan.cache_clear()
        cudnn_plans._handle.cache_clear()
        q, k, v, grad = drawn(256)
        for each in (cuts, cuts[:1], cuts[1:]):
            places = [0, *sorted(each), 256]
            options = options_of([end - begin for begin, end in pairwise(places)])
            out, _ = cudnn_varlen.cudnn_forward(q, k, v, options)
            torch.testing.assert_close(out, exact(q, k, v, grad, options)[0])
        cudnn_varlen._forward_plan.cache_clear()
        cudnn_plans._handle.cache_clear()
    assert len(fake.built) <= 4  # up to 8 documents or 16, up to 128 tokens or 256


def test_it_is_taken_where_it_is_asked_for_and_flash_otherwise(
    fake: FakeCudnn, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v, grad = drawn(128)
    options = options_of([100, 28])
    called: list[str] = []

    def flash(name: str) -> Any:
        return lambda *_: called.append(name)

    monkeypatch.setattr(varlen, "flash_forward", flash("forward"))
    monkeypatch.setattr(varlen, "flash_backward", flash("backward"))
    varlen.varlen_forward(q, k, v, options)
    varlen.varlen_backward(grad, q, k, v, q, q, options)
    assert called == ["forward", "backward"]

    monkeypatch.setattr(cudnn_varlen, "_WORTH_IT", 1)
    monkeypatch.setattr(cudnn_varlen, "half_refusal", lambda *_, **__: None)
    out, stats = varlen.varlen_forward(q, k, v, options)
    varlen.varlen_backward(grad, q, k, v, out, stats, options)
    assert (called, fake.built) == (["forward", "backward"], ["forward", "backward"])


@pytest.mark.parametrize(
    ("num_tokens", "bounds", "reason"),
    [
        (100, (None, 0), "100 tokens are no multiple of 64"),
        (128, (3, 3), "no windows but those that end at the query"),
        (128, (None, 0), None),
        (128, (None, None), None),
    ],
)
def test_what_it_does_not_take_is_refused(
    fake: FakeCudnn,
    num_tokens: int,
    bounds: tuple[int | None, int | None],
    reason: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cudnn_varlen, "_WORTH_IT", 1)
    monkeypatch.setattr(cudnn_varlen, "half_refusal", lambda *_, **__: None)
    why = cudnn_varlen.refusal(*drawn(num_tokens)[:3], options_of([num_tokens], *bounds))
    assert why is None if reason is None else reason in str(why)


def test_as_a_kernel_it_attends_within_documents_of_samples(fake: FakeCudnn, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (torch.randn(2, heads, 64, 16, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2))
    mask = masks.documents(ids=torch.stack([torch.arange(64) // 20, torch.arange(64) // 33])) & masks.causal()
    plain = flatout.attention(q, k, v, mask=mask, enable_gqa=True)
    kernel = cudnn_varlen.KERNEL
    monkeypatch.setattr(cudnn_varlen, "half_refusal", lambda *_, **__: None)
    monkeypatch.setattr(cudnn_varlen, "_WORTH_IT", 1)
    assert kernel.refusal(q, k, v, mask=mask, score=None, scale=0.25) is None
    assert "documents" in str(kernel.refusal(q, k, v, mask=masks.causal(), score=None, scale=0.25))

    out = kernel.run(q, k, v, mask=mask, score=None, scale=0.25)

    grad = torch.randn_like(out)
    for one, other in zip(
        (out, *torch.autograd.grad(out, (q, k, v), grad)),
        (plain, *torch.autograd.grad(plain, (q, k, v), grad)),
        strict=True,
    ):
        torch.testing.assert_close(one, other)
    assert fake.built == ["forward", "backward"]


def test_nothing_is_asked_of_cudnn_without_a_gpu_or_on_short_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v, _ = drawn(128)
    assert "the tensors are on cpu" in str(cudnn_varlen.refusal(q, k, v, options_of([128])))
    monkeypatch.setattr(cudnn_varlen, "half_refusal", lambda *_, **__: None)
    assert "no document has 1024 tokens" in str(cudnn_varlen.refusal(q, k, v, options_of([128])))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("key_heads", [4, 2])
@pytest.mark.parametrize(("left", "right"), [(None, 0), (None, None), (50, 0)])
def test_on_a_gpu_it_is_as_near_to_float64_as_flash_attention(
    left: int | None, right: int | None, key_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cudnn_varlen, "_WORTH_IT", 1)
    wide = drawn(1024, key_heads)
    options = options_of([1, 300, 64, 600, 59], left, right)
    q, k, v, grad = (t.to("cuda", torch.bfloat16) for t in wide)
    on_gpu = options._replace(spans=Spans(options.spans.offsets.cuda(), options.spans.longest))
    if why := cudnn_varlen.refusal(q, k, v, on_gpu):
        pytest.skip(why)
    expected = exact(*(t.double().cpu() for t in (q, k, v, grad)), options)

    def off(found: tuple[Tensor, ...]) -> list[float]:
        return [float((a.double().cpu() - b).norm() / b.norm()) for a, b in zip(found, expected, strict=True)]

    ways = {
        "cudnn": (cudnn_varlen.cudnn_forward, cudnn_varlen.cudnn_backward),
        "flash": (flash_forward, flash_backward),
    }
    wrong = {}
    for name, (forward, backward) in ways.items():
        out, stats = forward(q, k, v, on_gpu)
        wrong[name] = off((out, *backward(grad, q, k, v, out, stats, on_gpu)))
    assert all(ours <= 1.5 * theirs + 1e-4 for ours, theirs in zip(wrong["cudnn"], wrong["flash"], strict=True)), wrong
