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
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from flatout.errors import UsageError


class Attending(TorchFunctionMode):
    """Inside, `scaled_dot_product_attention` (q, k, v: [batch, heads, tokens, width]) works on each rank's pieces.

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
        return self._call(*args, **(kwargs or {}))

    def _call(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        given: dict[str, Any] = {
            "dropout_p": dropout_p,
            "is_causal": is_causal,
            "scale": scale,
            "enable_gqa": enable_gqa,
        }
        if not any(isinstance(t, DTensor) for t in (query, key, value)):
            return self._local(query, key, value, attn_mask, **given)
        mesh = next(t for t in (query, key, value) if isinstance(t, DTensor)).device_mesh
        q, k, v = (_as_dtensor(t, mesh) for t in (query, key, value))
        num = mesh.size()
        is_even = q.size(1) % num == 0 and k.size(1) % num == 0
        place = Shard(1) if is_even and any(p.is_shard() for t in (q, k, v) for p in t.placements) else Replicate()
        q_own, k_own, v_own = (t.redistribute(placements=[place]).to_local(grad_placements=[place]) for t in (q, k, v))
        mask = _piece_of(attn_mask, mesh, q.size(1)) if place.is_shard() else _whole_of(attn_mask)
        out = self._local(q_own, k_own, v_own, mask, **given)
        return DTensor.from_local(out, mesh, [place], run_check=False)

    def _local(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, dropout_p: float, is_causal: bool, **given: Any
    ) -> Tensor:
        if self._context is None:
            return self._attended(q, k, v, attn_mask=mask, dropout_p=dropout_p, is_causal=is_causal, **given)
        if mask is not None or dropout_p:
            raise UsageError(
                "attention with a mask or dropout over samples that are divided by tokens: a mask has one rank's tokens; "
                "use is_causal, or context 1"
            )
        k, v = (_Gathered.apply(t, self._context) for t in (k, v))  # type: ignore[no-untyped-call]
        if not is_causal:
            return self._attended(q, k, v, **given)
        tokens = q.size(-2)
        seen = tokens * (dist.get_rank(self._context) + 1)
        bias = causal_lower_right(tokens, seen)
        return self._attended(q, k[..., :seen, :], v[..., :seen, :], attn_mask=bias, **given)

    def _attended(self, q: Tensor, k: Tensor, v: Tensor, **given: Any) -> Tensor:
        if self._recompute and torch.is_grad_enabled():
            return checkpoint(F.scaled_dot_product_attention, q, k, v, use_reentrant=False, **given)  # type: ignore[no-any-return]
        return F.scaled_dot_product_attention(q, k, v, **given)


def _is_by_tokens(given: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
    """Whether an undivided layer is given tokens that are divided: torch 2.11 refuses it, as it makes one dimension of all but
    the last."""
    if not (isinstance(given, DTensor) and isinstance(weight, DTensor)) or given.dim() < 3:
        return False
    *others, place = given.placements
    return not others and place.is_shard() and place != Shard(given.dim() - 1) and weight.placements == (Replicate(),)


def _linear_by_tokens(given: DTensor, weight: DTensor, bias: DTensor | None = None) -> Tensor:
    mesh, (place,) = given.device_mesh, given.placements
    # of the weights each rank has the gradient of its tokens
    own, *sides = (t.to_local(grad_placements=[Partial()]) if t is not None else None for t in (weight, bias))
    assert own is not None
    out = F.linear(given.to_local(grad_placements=[place]), own, *sides)
    shape = torch.Size((*given.shape[:-1], weight.size(0)))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(out, mesh, [place], run_check=False, shape=shape, stride=stride)


def _as_dtensor(tensor: Tensor, mesh: Any) -> DTensor:
    return tensor if isinstance(tensor, DTensor) else DTensor.from_local(tensor, mesh, [Replicate()], run_check=False)


def _whole_of(mask: Tensor | None) -> Tensor | None:
    return mask.full_tensor() if isinstance(mask, DTensor) else mask


def _piece_of(mask: Tensor | None, mesh: Any, heads: int) -> Tensor | None:
    """For this rank's heads."""
    whole = _whole_of(mask)
    if whole is None or whole.dim() < 3 or whole.size(-3) != heads or heads == 1:
        return whole
    piece: Tensor = whole.chunk(mesh.size(), dim=-3)[mesh.get_local_rank()]
    return piece


def _gather(whole: Tensor, piece: Tensor, *, group: dist.ProcessGroup) -> None:
    """torch 2.13 has renamed both, and warns of the old names."""
    getattr(dist, "all_gather_single", dist.all_gather_into_tensor)(whole, piece, group=group)


def _scatter(piece: Tensor, whole: Tensor, *, group: dist.ProcessGroup) -> None:
    getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)(piece, whole, group=group)


class _Gathered(torch.autograd.Function):
    """[batch, heads, tokens, width] of all ranks of a group, by tokens; the backward scatters the sum."""

    @staticmethod
    def forward(ctx: Any, piece: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        first = piece.transpose(0, -2).contiguous()
        whole = first.new_empty(group.size() * first.size(0), *first.shape[1:])
        _gather(whole, first, group=group)
        return whole.transpose(0, -2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        first = gradient.transpose(0, -2).contiguous()
        piece = first.new_empty(first.size(0) // ctx.group.size(), *first.shape[1:])
        _scatter(piece, first, group=ctx.group)
        return piece.transpose(0, -2), None
