"""The kernels for GPUs: which is taken for what, and that each is no worse than plain attention."""

from __future__ import annotations

import pytest
import torch
from tests.blocks.kernels.attention.test_attention import MASKS, SCORES, S, assert_no_worse_than_plain, drawn

import flatout
from flatout import masks, scores
from flatout.blocks.kernels.attention import reference
from flatout.blocks.kernels.attention.api import attention_selection
from flatout.blocks.kernels.attention.dense_masks import attention_by_dense_mask, when_structure_is_used

pytestmark = [
    pytest.mark.device,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
GPU = torch.device("cuda", 0)


@pytest.mark.parametrize("mask", MASKS)
def test_every_mask_is_no_worse_than_plain_attention(mask: str) -> None:
    assert_no_worse_than_plain(drawn(width=64, dtype=torch.bfloat16).to(GPU), MASKS[mask](), SCORES["plain"])


@pytest.mark.parametrize("score", [s for s in SCORES if s != "plain"])
@pytest.mark.parametrize("mask", ["documents, causal", "graph"])
def test_every_score_is_no_worse_than_plain_attention(mask: str, score: str) -> None:
    assert_no_worse_than_plain(drawn(width=64, dtype=torch.bfloat16).to(GPU), MASKS[mask](), SCORES[score])


@pytest.mark.parametrize("mask", ["causal", "window", "documents, causal", "sinks"])
@pytest.mark.parametrize(("width", "key_heads"), [(48, 4), (64, 2), (128, 1)])
def test_widths_and_grouped_keys(mask: str, width: int, key_heads: int) -> None:
    given = drawn(width=width, key_heads=key_heads, dtype=torch.bfloat16).to(GPU)

    assert_no_worse_than_plain(given, MASKS[mask](), SCORES["plain"])


def test_float32_is_float32() -> None:
    assert_no_worse_than_plain(drawn(width=64).to(GPU), MASKS["causal"](), SCORES["plain"])


def test_the_hardware_form_of_softcap_is_within_its_bound() -> None:
    given = drawn(width=64, dtype=torch.bfloat16).to(GPU)
    mask = masks.causal()
    exact = flatout.attention(given.q, given.k, given.v, mask=mask, score=scores.softcap(3.0))

    near = flatout.attention(given.q, given.k, given.v, mask=mask, score=scores.softcap(3.0, form="hardware"))

    # each weight is off by a factor of at most exp(2 * 3 * 2^-11); bfloat16 rounds both results
    bound = (2 * 3.0 * 2**-11 + 2 * 2**-8) * given.v.abs().max().item()
    assert (near.double() - exact.double()).abs().max().item() <= bound
    assert not torch.equal(near, exact)  # else it was not the instruction


@pytest.mark.parametrize(
    ("mask", "kernel"),
    [
        (None, "attention.cudnn"),
        (masks.causal(), "attention.cudnn"),
        (masks.window(20), "attention.cudnn-window"),
        (masks.documents([0, 50, S]) & masks.causal(), "attention.flash-varlen"),
        (masks.documents([0, 50, S]) & masks.window(9), "attention.flash-varlen"),
        (masks.documents(ids=torch.arange(S).repeat(2, 1) // 70) & masks.causal(), "attention.flash-varlen"),
        (masks.causal() | masks.prefix(5), "attention.flex"),
    ],
    ids=repr,
)
def test_structure_decides_the_kernel(mask: masks.Mask | None, kernel: str) -> None:
    given = drawn(width=64, dtype=torch.bfloat16).to(GPU)

    choice = attention_selection(given.q, given.k, given.v, mask=mask)

    assert choice.kernel.id == kernel or (
        kernel == "attention.cudnn-window" and "nvidia-cudnn-frontend is not installed" in str(choice)
    )


@pytest.mark.parametrize("key_heads", [4, 2])
@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("kind", ["documents", "window", "no structure"])
def test_a_dense_mask_is_read_as_it_runs(kind: str, is_compiled: bool, key_heads: int) -> None:
    length = 300
    ids = torch.stack([torch.arange(length) // 120, torch.arange(length) // 77])
    dense = {
        "documents": (masks.documents(ids=ids) & masks.causal()).dense(length, length),
        "window": masks.window(40).dense(length, length),
        "no structure": torch.rand(length, length) < 0.7 + 0.3 * torch.eye(length),
    }[kind].to(GPU)
    q, k, v = (
        torch.randn(2, length, heads, 64, device=GPU, dtype=torch.bfloat16).transpose(1, 2).requires_grad_()
        for heads in (4, key_heads, key_heads)
    )
    grad, used = torch.randn_like(q), []
    attend = torch.compile(attention_by_dense_mask, fullgraph=True) if is_compiled else attention_by_dense_mask
    stop = when_structure_is_used(lambda: used.append(kind))
    out = attend(q, k, v, dense)
    stop()
    assert bool(used) == (kind != "no structure")
    wide = [t.detach().double().requires_grad_() for t in (q, k, v)]
    exact = torch.nn.functional.scaled_dot_product_attention(*wide, dense, enable_gqa=True)
    found = (out, *torch.autograd.grad(out, (q, k, v), grad))
    for ours, theirs in zip(found, (exact, *torch.autograd.grad(exact, wide, grad.double())), strict=True):
        assert float((ours.double() - theirs).norm()) <= 2e-2 * float(theirs.norm())


def test_new_documents_and_new_lengths_compile_nothing() -> None:
    from torch._dynamo.utils import counters

    def step(length: int, cuts: list[int]) -> None:
        q, k, v = (
            torch.randn(1, 2, length, 64, device=GPU, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)
        )
        mask = masks.documents([0, *cuts, length]) & masks.causal()
        flatout.attention(q, k, v, mask=mask, score=scores.softcap(4.0)).sum().backward()

    step(700, [300])
    step(900, [10, 400])  # the second length makes the lengths variables
    num = counters["stats"]["unique_graphs"]
    for number in range(20):
        step(500 + 37 * number, sorted({1 + (i * 97 + number) % 400 for i in range(1 + number % 7)}))

    assert counters["stats"]["unique_graphs"] == num


def test_nothing_waits_and_one_kernel_runs_a_direction() -> None:
    q, k, v = (torch.randn(1, 4, 512, 64, device=GPU, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    mask = masks.causal() | masks.prefix(100)
    flatout.attention(q, k, v, mask=mask).sum().backward()  # compiles
    grad = torch.randn(1, 4, 512, 64, device=GPU, dtype=torch.bfloat16)

    with flatout.expect(forward_kernels=1, backward_kernels=3, host_waits=0):
        out = flatout.attention(q, k, v, mask=mask)
        torch.autograd.grad(out, [q, k, v], grad)


def test_memory_grows_with_the_length() -> None:
    peaks = []
    for length in (4096, 16384):
        q, k, v = (
            torch.randn(1, 2, length, 64, device=GPU, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)
        )
        mask = masks.window(255) | masks.sinks(4)
        flatout.attention(q, k, v, mask=mask & masks.causal()).sum().backward()
        with flatout.expect() as observed:
            flatout.attention(q, k, v, mask=mask & masks.causal()).sum().backward()
        assert observed.peak_bytes is not None
        peaks.append(observed.peak_bytes)

    assert peaks[1] < 4.5 * peaks[0]


def test_a_graph_that_is_kept_can_be_differentiated_twice_at_any_multiple_of_a_tile() -> None:
    for length in (256, 300, 512):  # after the first lengths are no constants any more
        q, k, v = (
            torch.randn(1, 2, length, 64, device=GPU, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)
        )
        grad, score = torch.randn_like(q), scores.softcap(3.0)
        out = flatout.attention(q, k, v, mask=masks.causal(), score=score)
        first = torch.autograd.grad(out, (q, k, v), grad, retain_graph=True)
        for ours, again in zip(first, torch.autograd.grad(out, (q, k, v), grad), strict=True):
            assert torch.equal(ours, again)
        wide = [t.detach().double().requires_grad_() for t in (q, k, v)]
        exact = reference.reference_attention(*wide, mask=masks.causal().to(GPU), score=score, scale=64**-0.5)
        for ours, theirs in zip(first, torch.autograd.grad(exact, wide, grad.double()), strict=True):
            assert float((ours.double() - theirs).norm()) <= 2e-2 * float(theirs.norm())
