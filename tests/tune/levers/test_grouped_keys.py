"""Attention in compiled code that reads repeated keys once."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from tests.evidence_builder import EvidenceBuilder, tensor
from torch import Tensor
from torch._inductor import config
from torch._inductor.utils import fresh_cache
from torch._subclasses.fake_tensor import FakeTensorMode

from flatout.tune.levers import grouped_keys
from flatout.tune.levers.grouped_keys import keys_read_once_in_graphs, read_keys_once, repeats_keys

Call = Callable[[Tensor, Tensor, Tensor], Tensor]


def expanded(x: Tensor, count: int) -> Tensor:
    B, G, T, D = x.shape
    return x[:, :, None, :, :].expand(B, G, count, T, D).reshape(B, G * count, T, D)


def by_repeats(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = k.repeat_interleave(4, dim=1), v.repeat_interleave(4, dim=-3)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def by_functions_and_names(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = torch.repeat_interleave(k, repeats=4, dim=1), expanded(v, 4).contiguous()
    return F.scaled_dot_product_attention(query=q, key=k, value=v, scale=0.3)


def by_copies_read_elsewhere(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k = expanded(k, 4)
    return F.scaled_dot_product_attention(q, k, expanded(v, 4)) + k.mean()


def under_a_mask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
    return F.scaled_dot_product_attention(q, k.repeat_interleave(4, 1), v.repeat_interleave(4, 1), attn_mask=mask)


def in_another_order(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Head h reads keys h modulo G, and not h over the count."""
    return F.scaled_dot_product_attention(q, k.repeat(1, 4, 1, 1), v.repeat(1, 4, 1, 1))


def along_another_axis(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The new axis is that before the heads: copies stand as `repeat` lays them."""
    B, G, T, D = k.shape
    k, v = (x[:, None].expand(B, 4, G, T, D).reshape(B, 4 * G, T, D) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v)


def transposed_behind(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As Llama's own code: copies of (B, T, G, D), then the heads come first."""
    (B, G, T, D), (k, v) = k.shape, (x.transpose(1, 2) for x in (k, v))
    k = k[:, :, :, None, :].expand(B, T, G, 4, D).reshape(B, T, G * 4, D)
    return F.scaled_dot_product_attention(q, k.transpose(1, 2), v.repeat_interleave(4, dim=2).transpose(1, 2))


def with_heads_reordered(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    order = torch.arange(7, -1, -1)
    k, v = k.repeat_interleave(4, dim=1)[:, order], v.repeat_interleave(4, dim=1)[:, order]
    return F.scaled_dot_product_attention(q, k, v)


def of_copies_as_keys_and_values(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    copies = expanded(k + v, 4)
    return F.scaled_dot_product_attention(q, copies, copies)


def of_keys_that_change(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k = k * 1
    copies = k.repeat_interleave(4, dim=1)
    k[:, :, 0] = 0
    return F.scaled_dot_product_attention(q, copies, v.repeat_interleave(4, dim=1)) + k.mean()


def results(call: Call, inputs: list[Tensor]) -> list[Tensor]:
    y = call(*inputs)
    grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(1))
    return [y.detach(), *torch.autograd.grad(y, inputs, grad)]


@pytest.mark.parametrize(
    ("call", "num_changed"),
    [
        (by_repeats, 1),
        (by_functions_and_names, 1),
        (by_copies_read_elsewhere, 1),
        (under_a_mask, 0),
        (in_another_order, 0),
        (along_another_axis, 0),
        (transposed_behind, 1),
        (with_heads_reordered, 0),
        (of_copies_as_keys_and_values, 1),
        (of_keys_that_change, 0),
    ],
)
def test_results_and_gradients_stay_and_copies_go(call: Call, num_changed: int) -> None:
    numbers: list[int] = []

    def backend(module: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        numbers.append(read_keys_once(module.graph))
        module.recompile()
        return module.forward

    torch._dynamo.reset()
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(2, heads, 24, 16, generator=generator).requires_grad_() for heads in (8, 2, 2)]
    found = results(torch.compile(call, backend=backend), inputs)
    assert numbers == [num_changed]
    for a, b in zip(found, results(call, inputs), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.slow
def test_inductor_calls_it_behind_a_pass_of_the_users_own(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    change = grouped_keys.read_keys_once
    monkeypatch.setattr(grouped_keys, "read_keys_once", lambda graph: calls.append(f"changed {change(graph)}"))
    torch._dynamo.reset()
    q, k, v = (torch.randn(1, heads, 8, 16) for heads in (8, 2, 2))
    # of a graph that is found in a cache nothing is changed any more
    with fresh_cache(), config.patch(pre_grad_custom_pass=lambda graph: calls.append("the user's")):
        undo = keys_read_once_in_graphs()
        own = config.pre_grad_custom_pass
        torch.testing.assert_close(torch.compile(by_repeats)(q, k, v), by_repeats(q, k, v))
        undo()
    assert calls == ["the user's", "changed 1"] and config.pre_grad_custom_pass is not own
    assert copy.deepcopy(own) is own


def test_the_key_of_a_cache_tells_it() -> None:
    undo = keys_read_once_in_graphs()
    own = config.pre_grad_custom_pass
    undo()
    assert config.pre_grad_custom_pass is None
    assert own.uuid() is not None and pickle.loads(pickle.dumps(own)) == repr(own.uuid())
    with config.patch(pre_grad_custom_pass=lambda graph: None):  # what it does no key can tell
        undo = keys_read_once_in_graphs()
        assert config.pre_grad_custom_pass.uuid() is None
        undo()


@pytest.mark.parametrize(
    ("copied", "is_told"),
    [((2, 2, 4, 24, 16), True), ((2, 24, 2, 4, 16), True), ((2, 2, 1, 24, 16), False), (None, False)],
)
def test_the_evidence_tells_where_keys_are_repeated(copied: tuple[int, ...] | None, is_told: bool) -> None:
    builder = EvidenceBuilder()
    builder.operator("aten._scaled_dot_product_flash_attention", inputs=[tensor(2, 8, 24, 16)] * 3, op_s=0.01)
    if copied is not None:
        builder.operator("aten.clone", inputs=[tensor(*copied)], op_s=0.001)
    assert repeats_keys(builder.build()) is is_told


@pytest.mark.parametrize(
    ("dtype", "width", "capability", "is_known"),
    [
        (torch.bfloat16, 64, (9, 0), True),
        (torch.bfloat16, 256, (9, 0), False),
        (torch.bfloat16, 64, (7, 5), False),
        (torch.float32, 64, (9, 0), False),
    ],
)
def test_on_a_gpu_only_calls_stay_fused_for_which_a_kernel_knows_groups(
    dtype: torch.dtype, width: int, capability: tuple[int, int], is_known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    with FakeTensorMode():
        result = torch.empty(2, 8, 24, width, dtype=dtype, device="cuda")
        assert grouped_keys._has_kernel(result) is is_known
