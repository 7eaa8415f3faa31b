"""Attention of a divided model: each rank its own heads, and all tokens of the others where a sample is divided by tokens. And
layers that are whole on each rank, on tokens that are divided.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from flatout.blocks.parallel.tensor_parallel import as_dtensor
from flatout.core.errors import UsageError
from flatout.core.runtime.patches import AttentionCall


class Attending(TorchFunctionMode):
    """A mode in which `scaled_dot_product_attention` (q, k, v: [batch, heads, tokens, width]) works on each rank's pieces.

    DTensors whose heads are divided are computed head by head. With a `context` group, whose ranks hold the tokens of each sample
    one after the other, keys and values of all its ranks are gathered (their gradients scattered and summed in the backward), and
    `is_causal` means the order of the whole sample. Causal, the last rank of c does (2c - 1) / c times the mean work.

    With `recompute` attention is computed again in the backward, from q, k and v (Korthikanti et al., 2022: it is the
    cheapest to compute again for what it holds). `num_calls` counts. Where nothing of this is asked for, `on` does nothing. A
    linear layer without a role takes its rank's tokens.

    Raises UsageError for a mask or dropout with a context group.
    """

    def __init__(self, context: dist.ProcessGroup | None, *, has_pieces: bool, recompute: bool) -> None:
        super().__init__()
        self._context = context
        self._recompute = recompute
        self._is_inside = not (has_pieces or recompute or context is not None)
        self.num_calls = 0

    @contextmanager
    def on(self) -> Iterator[None]:
        """Inside, unless this is inside already: a block that is recomputed in the backward is outside of its forward."""
        if self._is_inside:
            yield
            return
        self._is_inside = True
        try:
            with self:
                yield
        finally:
            self._is_inside = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear and not kwargs and _is_by_tokens(*args):
            return _linear_by_tokens(*args)
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        self.num_calls += 1
        return self._call(AttentionCall(*args, **(kwargs or {})))

    def _call(self, call: AttentionCall) -> Tensor:
        mesh = next((t.device_mesh for t in call[:3] if isinstance(t, DTensor)), None)
        if mesh is None:
            return self._local(call)
        q, k, v = (as_dtensor(t, mesh) for t in call[:3])
        num = mesh.size()
        is_even = q.size(1) % num == 0 and k.size(1) % num == 0
        place = Shard(1) if is_even and any(p.is_shard() for t in (q, k, v) for p in t.placements) else Replicate()
        q_own, k_own, v_own = (t.redistribute(placements=[place]).to_local(grad_placements=[place]) for t in (q, k, v))
        mask = call.attn_mask.full_tensor() if isinstance(call.attn_mask, DTensor) else call.attn_mask
        own_mask = _piece_of(mask, mesh, q.size(1)) if place.is_shard() else mask
        out = self._local(call._replace(query=q_own, key=k_own, value=v_own, attn_mask=own_mask))
        return DTensor.from_local(out, mesh, [place], run_check=False)

    def _local(self, call: AttentionCall) -> Tensor:
        if self._context is None:
            return call.run(self._attended)
        if call.attn_mask is not None or call.dropout_p:
            raise UsageError(
                "attention with a mask or dropout over samples that are divided by tokens: a mask has one rank's tokens; "
                "use is_causal, or context 1"
            )
        k, v = (_Gathered.apply(t, self._context) for t in (call.key, call.value))  # type: ignore[no-untyped-call]
        if not call.is_causal:
            return call._replace(key=k, value=v).run(self._attended)
        tokens = call.query.size(-2)
        visible = tokens * (dist.get_rank(self._context) + 1)
        k, v, bias = k[..., :visible, :], v[..., :visible, :], causal_lower_right(tokens, visible)
        return call._replace(key=k, value=v, attn_mask=bias, is_causal=False).run(self._attended)

    def _attended(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        if self._recompute and torch.is_grad_enabled():
            return checkpoint(F.scaled_dot_product_attention, q, k, v, use_reentrant=False, **options)  # type: ignore[no-any-return]
        return F.scaled_dot_product_attention(q, k, v, **options)


def _is_by_tokens(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
    """Whether an undivided layer has divided tokens as input.

    torch 2.11 refuses that, as it makes one dimension of all but the last.
    """
    if not (isinstance(inputs, DTensor) and isinstance(weight, DTensor)) or inputs.dim() < 3:
        return False
    *others, place = inputs.placements
    return not others and place.is_shard() and place != Shard(inputs.dim() - 1) and weight.placements == (Replicate(),)


def _linear_by_tokens(inputs: DTensor, weight: DTensor, bias: DTensor | None = None) -> Tensor:
    mesh, (place,) = inputs.device_mesh, inputs.placements
    # of the weights each rank has the gradient of its tokens
    own, *sides = (t.to_local(grad_placements=[Partial()]) if t is not None else None for t in (weight, bias))
    assert own is not None
    out = F.linear(inputs.to_local(grad_placements=[place]), own, *sides)
    shape = torch.Size((*inputs.shape[:-1], weight.size(0)))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(out, mesh, [place], run_check=False, shape=shape, stride=stride)


def _piece_of(mask: Tensor | None, mesh: DeviceMesh, heads: int) -> Tensor | None:
    """The part of a mask for this rank's heads."""
    if mask is None or mask.dim() < 3 or mask.size(-3) != heads or heads == 1:
        return mask
    return mask.chunk(mesh.size(), dim=-3)[mesh.get_local_rank()]


class _Gathered(torch.autograd.Function):
    """All-gather [batch, heads, tokens, width] of a group's ranks by tokens; the backward scatters the sum."""

    @staticmethod
    def forward(ctx: Any, piece: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        first = piece.transpose(0, -2).contiguous()
        whole = first.new_empty(group.size() * first.size(0), *first.shape[1:])
        # torch 2.13 has given the function another name, and warns of the old one
        getattr(dist, "all_gather_single", dist.all_gather_into_tensor)(whole, first, group=group)
        return whole.transpose(0, -2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        first = gradient.transpose(0, -2).contiguous()
        piece = first.new_empty(first.size(0) // ctx.group.size(), *first.shape[1:])
        getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)(piece, first, group=ctx.group)
        return piece.transpose(0, -2), None
