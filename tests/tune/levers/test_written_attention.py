"""Attention that is written out in products and a softmax, in compiled code."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, einsum
from torch._inductor.utils import fresh_cache
from torch._subclasses.fake_tensor import FakeTensorMode

from flatout.tune.levers import written_attention
from flatout.tune.levers.graph_passes import change_graphs
from flatout.tune.levers.written_attention import fuse_attention, written_attention_in_graphs

Call = Callable[[Tensor, Tensor, Tensor], Tensor]


def by_einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = einsum("b h i d, b h j d -> b h i j", q, k) * q.shape[-1] ** -0.5
    return einsum("b h i j, b h j d -> b h i d", F.dropout(scores.softmax(dim=-1), 0.0), v)


def by_other_letters(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = torch.softmax(einsum("nhqc,nhkc->nhqk", q / 3, k), 3)
    return einsum("nhqk,nhkc->nhqc", weights, v).transpose(1, 2).flatten(2)


def by_products(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = F.softmax(q @ k.transpose(-2, -1) / 2.0, dim=-1, dtype=torch.float32).to(q.dtype)
    return torch.matmul(F.dropout(weights, 0.5, training=False), v)


def of_three_axes(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    return torch.bmm((2 * torch.bmm(q, k.transpose(1, 2))).softmax(-1), v)


def viewed_behind(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    B, H, T, D = q.shape
    return (torch.matmul(q, k.mT).softmax(-1) @ v).view(B * H, T * D)


def without_a_factor(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.permute(0, 1, 3, 2)).softmax(-1) @ v


def with_copies_that_nothing_reads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As x-transformers does, which keeps both for those who ask."""
    scores = q @ k.mT * 0.5
    kept = [scores.clone()]
    weights = scores.softmax(-1, dtype=torch.float32)
    kept.append(weights.detach())
    return weights.type(v.dtype) @ v


def whose_weights_are_returned(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = (q @ k.mT).softmax(-1)
    return weights @ v + weights.sum()


def whose_scores_are_read(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT
    return scores.softmax(-1) @ v + scores.mean()


def over_queries(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).softmax(-2) @ v


def by_a_number_that_is_learned(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ((q @ k.mT) * v.mean()).softmax(-1) @ v


def with_values_written_to(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    v = v * 1
    weights = (q @ k.mT).softmax(-1)
    v[:, :, 0] = 0
    return weights @ v


def across_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return einsum("bhij,bhjd->bhid", einsum("bhid,bgjd->bhij", q, k).softmax(-1), v)


def linear(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return einsum("bhde,bhnd->bhne", einsum("bhnd,bhne->bhde", k.softmax(-2), v), q.softmax(-1))


def results(call: Call, inputs: list[Tensor]) -> list[Tensor]:
    y = call(*inputs)
    grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=y.dtype)
    return [y.detach(), *torch.autograd.grad(y, inputs, grad)]


def drawn(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 3, n, 16, generator=generator, dtype=dtype).requires_grad_() for n in (20, 24, 24)]


@pytest.mark.parametrize(
    ("call", "num_changed"),
    [
        (by_einsum, 1),
        (by_other_letters, 1),
        (by_products, 1),
        (of_three_axes, 1),
        (viewed_behind, 1),
        (without_a_factor, 1),
        (with_copies_that_nothing_reads, 1),
        (whose_weights_are_returned, 0),
        (whose_scores_are_read, 0),
        (over_queries, 0),
        (by_a_number_that_is_learned, 0),
        (with_values_written_to, 0),
        (across_heads, 0),
        (linear, 0),
    ],
)
def test_results_and_gradients_stay(call: Call, num_changed: int) -> None:
    numbers: list[int] = []

    def backend(module: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        numbers.append(fuse_attention(module.graph))
        module.graph.lint()
        module.recompile()
        fused = [node for node in module.graph.nodes if node.target is F.scaled_dot_product_attention]
        assert len(fused) == num_changed
        assert not num_changed or not any("softmax" in str(n.target) for n in module.graph.nodes)
        return module.forward

    torch._dynamo.reset()
    inputs = drawn()
    found = results(torch.compile(call, backend=backend), inputs)
    assert numbers == [num_changed]
    for a, b in zip(found, results(call, inputs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)  # one of them computes its softmax in float32


@pytest.mark.slow
def test_under_autocast_compiled_code_takes_inputs_of_mixed_kinds_as_products_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    changed: list[int] = []
    change = written_attention.fuse_attention
    monkeypatch.setattr(written_attention, "fuse_attention", lambda graph: changed.append(change(graph)))
    q, k, v = (x.detach() for x in drawn(torch.float32))
    torch._dynamo.reset()
    with fresh_cache(), torch.autocast("cpu", torch.bfloat16):
        undo = written_attention_in_graphs()
        try:
            found = torch.compile(by_einsum)(q.bfloat16(), k, v)
        finally:
            undo()
    assert changed == [1] and found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), by_einsum(q, k, v), rtol=0.02, atol=0.02)


def test_changes_of_graphs_follow_each_other() -> None:
    from torch._inductor import config

    calls: list[str] = []
    undo_first = change_graphs(lambda graph: calls.append("first"), __file__)
    first = config.pre_grad_custom_pass
    undo_second = change_graphs(lambda graph: calls.append("second"))
    second = config.pre_grad_custom_pass
    second(torch.fx.Graph())
    assert calls == ["first", "second"]
    assert None not in (first.uuid(), second.uuid()) and first.uuid() != second.uuid()
    undo_second()
    assert config.pre_grad_custom_pass is first
    undo_first()
    assert config.pre_grad_custom_pass is None


@pytest.mark.parametrize(
    ("dtype", "width", "capability", "is_known"),
    [
        (torch.bfloat16, 256, (9, 0), True),
        (torch.bfloat16, 512, (9, 0), False),
        (torch.bfloat16, 64, (7, 5), False),
        (torch.float32, 64, (9, 0), False),
    ],
)
def test_on_a_gpu_it_needs_a_fused_kernel(
    dtype: torch.dtype, width: int, capability: tuple[int, int], is_known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    with FakeTensorMode():
        result = torch.empty(2, 8, 24, width, dtype=dtype, device="cuda")
        assert written_attention._has_kernel(result, result) is is_known
