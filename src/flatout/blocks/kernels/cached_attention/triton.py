"""One Triton kernel: reads keys and values up to the position and nothing behind it.

B batch, N heads of queries, G heads of keys, S places, H head dim
"""

from __future__ import annotations

from functools import lru_cache
from importlib import import_module
from typing import Any, Final

import torch
from torch import Tensor

from flatout.blocks.kernels.matmul.launch import Counters, TritonLaunch, scratch_and_counters
from flatout.blocks.kernels.opaque import opaque
from flatout.blocks.kernels.selection import no_triton
from flatout.core.parts import kernel

_SOURCE: Final = "flatout.blocks.kernels.cached_attention.on_device.parts"
_PLACES: Final = 32
"""At a time, 8 KiB of keys of 128 numbers in 16 bits: 16 numbers a thread with 4 warps, twice."""
_PROGRAMS: Final = 528
"""Four for each processor of an H200, if there are enough places."""


@opaque(
    "cached_attention_triton(Tensor q, Tensor keys, Tensor values, Tensor position) -> Tensor",
    lambda q, keys, values, position: q.new_empty(q.shape),
)
def run(q_BN1H: Tensor, keys_BGSH: Tensor, values_BGSH: Tensor, position: Tensor) -> Tensor:
    """The attention by one Triton kernel."""
    q = q_BN1H.contiguous()
    out = torch.empty_like(q)
    if not q.numel():
        return out
    size_b, heads, _, dim = q.shape
    places = keys_BGSH.shape[2]
    num_parts = num_parts_of(size_b * heads, places)
    sizes = (places, dim, heads // keys_BGSH.shape[1], num_parts)
    launch, counters = _bound(size_b * heads, num_parts, q.device, q.dtype, keys_BGSH.dtype, *sizes)
    shared = scratch_and_counters(size_b * heads * num_parts * (dim + 2), counters, q.device)
    launch(q, keys_BGSH, values_BGSH, position, out, *shared, dim**-0.5, *sizes, _PLACES)
    return out


def num_parts_of(heads: int, places: int) -> int:
    """A power of two that makes programs enough, of 64 places at least each.

    >>> num_parts_of(32, 1024), num_parts_of(32, 100), num_parts_of(1024, 8192)
    (16, 1, 1)
    """
    most = max(1, min(places // (2 * _PLACES), _PROGRAMS // heads, 64))
    return 1 << (most.bit_length() - 1)


@lru_cache(maxsize=256)
def _bound(heads: int, num_parts: int, device: torch.device, *form: object) -> tuple[TritonLaunch, Counters]:
    """One for each form of call: what is launched without a look at the arguments must be like the first."""
    source: Any = import_module(_SOURCE)
    return TritonLaunch(source.attend, (heads, num_parts, 1), num_warps=4), Counters(heads, device)


def refusal(q_BN1H: Tensor, keys_BGSH: Tensor, values_BGSH: Tensor, position: Tensor) -> str | None:
    """GPUs, one new token, head dims that are powers of two, dense caches, no gradients."""
    if q_BN1H.shape[2] != 1:
        return f"there are {q_BN1H.shape[2]} new tokens; this kernel is for one"
    dim = q_BN1H.shape[3]
    if dim & (dim - 1) or not 16 <= dim <= 256:
        return f"a head dim of {dim} is no power of two from 16 to 256"
    if not (keys_BGSH.is_contiguous() and values_BGSH.is_contiguous()):
        return "keys or values do not lie one after the other"
    if torch.is_grad_enabled() and any(t.requires_grad for t in (q_BN1H, keys_BGSH, values_BGSH)):
        return "gradients are recorded, and this kernel has none"
    return no_triton(q_BN1H, keys_BGSH, values_BGSH, position)


KERNEL = kernel(__name__, "One Triton kernel over the places that are filled", run, order=100, refusal=refusal)
