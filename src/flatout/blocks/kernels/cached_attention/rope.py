"""One new token's attention from the product for its query, key and value: `rope_decode_attention`, as torch says it, and by one
kernel that turns, writes the cache and attends.

B batch, N heads of queries, G heads of keys, S places, H head dim
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from flatout.blocks.kernels.cached_attention.reference import reference_cached_attention
from flatout.blocks.kernels.matmul.launch import Counters, scratch_and_counters
from flatout.blocks.kernels.nvrtc import Function, compiled, has_early_launches, why_not
from flatout.blocks.kernels.opaque import composed, opaque
from flatout.blocks.kernels.quantised_linear.mma import WORDS, processors
from flatout.core.errors import UsageError

_FOLDER: Final = Path(__file__).parent / "on_device"
HEADS: Final = _FOLDER / "heads.cu"
"""What kernels in CUDA C do with a head's numbers; the device's instructions go before it."""
_DIM: Final = 128
_PLACES: Final = 64
"""That a program takes at a time."""
_STAGES: Final = 2
"""Of 64 places' keys and values, 32 KiB, which are on their way to a program at a time."""
_PROGRAMS: Final = 2
"""Side by side on a processor."""
_MOST_OF_CLUSTER: Final = 8
"""Programs, on every device that has clusters."""
_counters = lru_cache(maxsize=64)(Counters)
_ARGUMENTS: Final = (
    "(Tensor qkv, Tensor cosines, Tensor sines, Tensor(a!) keys, Tensor(b!) values, Tensor position) -> Tensor"
)


def rope_decode_attention(
    qkv_BC: Tensor, cosines_SH2: Tensor, sines_SH2: Tensor, keys_BGSH: Tensor, values_BGSH: Tensor, position: Tensor
) -> Tensor:
    """Attention [B, N H] of one new token of each sequence, whose place is `position` (int64 [1]): keys and values are
    written there.

    `qkv_BC` holds the N heads of queries, then the G of keys, then the G of values, not rotated yet. Rows of `cosines_SH2` and
    `sines_SH2` (float32, half a head wide) are the angles of each place; the first half of a head is rotated with the second (as
    in Llama of transformers). Queries and keys are rounded to qkv's dtype once rotated.

    On a GPU one kernel for bfloat16 and heads of 128, launched before the launch before it has ended: that launch must
    write neither the position nor older places of the cache. Elsewhere the reference. No gradients. Raises UsageError for
    sizes that do not fit.

    >>> keys, values = torch.zeros(1, 1, 4, 2), torch.zeros(1, 1, 4, 2)
    >>> rope_decode_attention(torch.ones(1, 6), torch.ones(4, 1), torch.zeros(4, 1), keys, values, torch.tensor([0]))
    tensor([[1., 1.]])
    """
    why = _why_unfit(qkv_BC, cosines_SH2, sines_SH2, keys_BGSH, values_BGSH)
    if why is not None:
        raise UsageError(why)
    return _dispatched(qkv_BC, cosines_SH2, sines_SH2, keys_BGSH, values_BGSH, position)


@composed(f"rope_decode_attention{_ARGUMENTS}")
def _dispatched(*args: Tensor) -> Tensor:
    y: Tensor = (run if why_no_rope_kernel(*args) is None else reference_rope_decode_attention)(*args)
    return y


def reference_rope_decode_attention(
    qkv_BC: Tensor, cosines_SH2: Tensor, sines_SH2: Tensor, keys_BGSH: Tensor, values_BGSH: Tensor, position: Tensor
) -> Tensor:
    """The specification, in qkv's dtype; angles are taken in float32, and in float64 with float64."""
    batch, groups, _, dim = keys_BGSH.shape
    heads = qkv_BC.shape[1] // dim - 2 * groups
    cos, sin = cosines_SH2.index_select(0, position), sines_SH2.index_select(0, position)
    q, k, v = qkv_BC.view(batch, -1, 1, dim).split([heads, groups, groups], 1)
    keys_BGSH.index_copy_(2, position, rotate_halves(k, cos, sin).to(keys_BGSH.dtype))
    values_BGSH.index_copy_(2, position, v.to(values_BGSH.dtype))
    return reference_cached_attention(rotate_halves(q, cos, sin), keys_BGSH, values_BGSH, position).reshape(
        batch, heads * dim
    )


def rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of halves, rounded once."""
    a, b = x.to(torch.promote_types(x.dtype, torch.float32)).chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


def why_no_rope_kernel(
    qkv: Tensor, cosines: Tensor, sines: Tensor, keys: Tensor, values: Tensor, position: Tensor
) -> str | None:
    """Why the reference runs and not the kernel; None when the kernel does."""
    why = why_not(qkv.device)
    if why is not None:
        return why
    if any(t.dtype != torch.bfloat16 for t in (qkv, keys, values)) or keys.shape[3] != _DIM:
        return f"the kernel is for bfloat16 and heads of {_DIM}"
    if position.dtype != torch.int64 or position.device != qkv.device:
        return "position must be int64, on the device of qkv"
    if any(t.dtype != torch.float32 or not t.is_contiguous() for t in (cosines, sines)):
        return "cosines and sines must be float32, row after row"
    if not (qkv.is_contiguous() and keys.is_contiguous() and values.is_contiguous()) or qkv.storage_offset() % 8:
        return "qkv, keys or values are not contiguous"
    if torch.is_grad_enabled() and any(t.requires_grad for t in (qkv, keys, values)):
        return "gradients are recorded, and the kernel has none"
    return None


@opaque(
    f"rope_decode_attention_on_device{_ARGUMENTS}",
    lambda qkv, cosines, sines, keys, values, position: qkv.new_empty(
        (qkv.shape[0], qkv.shape[1] - 2 * keys.shape[1] * keys.shape[3])
    ),
)
def run(qkv: Tensor, cosines: Tensor, sines: Tensor, keys: Tensor, values: Tensor, position: Tensor) -> Tensor:
    """The attention by the kernel on the device."""
    batch, groups, places, dim = keys.shape
    heads = qkv.shape[1] // dim - 2 * groups
    num = batch * heads
    is_cluster, num_parts = parts_of(num, places, processors(qkv.device), has_clusters=has_early_launches(qkv.device))
    out = qkv.new_empty((batch, heads * dim))
    function = _function(is_cluster, _STAGES, qkv.device)
    parts, counters = None, None
    if not is_cluster:
        parts, counters = scratch_and_counters(num * num_parts * (dim + 2), _counters(num, qkv.device), qkv.device)
    function(
        (heads, num_parts, batch), 256, _STAGES * 4 * _PLACES * _DIM,
        qkv, cosines, sines, keys, values, position, out, parts, counters, heads, heads // groups, places, num_parts,
        float(dim**-0.5), cluster=(1, num_parts if is_cluster else 1, 1),
    )  # fmt: skip
    return out


def parts_of(heads: int, places: int, num_processors: int, *, has_clusters: bool) -> tuple[bool, int]:
    """Whether the parts of a head are a cluster, and into how many the places are cut: as many as make programs enough, of 64
    places at least each. A cluster that is too small to keep the device busy is none.

    >>> parts_of(32, 1024, 132, has_clusters=True), parts_of(32, 100, 132, has_clusters=True)
    ((True, 8), (True, 1))
    >>> parts_of(8, 4096, 132, has_clusters=True), parts_of(1024, 8192, 132, has_clusters=False)
    ((False, 33), (False, 1))
    """
    wanted = max(1, min(places // _PLACES, _PROGRAMS * num_processors // heads))
    is_cluster = has_clusters and wanted <= 2 * _MOST_OF_CLUSTER
    return is_cluster, min(wanted, _MOST_OF_CLUSTER) if is_cluster else wanted


def _why_unfit(qkv: Tensor, cosines: Tensor, sines: Tensor, keys: Tensor, values: Tensor) -> str | None:
    if keys.dim() != 4 or keys.shape != values.shape or qkv.dim() != 2 or qkv.shape[0] != keys.shape[0]:
        return f"qkv {tuple(qkv.shape)}, keys {tuple(keys.shape)} and values {tuple(values.shape)} do not meet"
    _, groups, places, dim = keys.shape
    heads = qkv.shape[1] // dim - 2 * groups
    if qkv.shape[1] % dim or heads < 1 or heads % groups:
        return f"{qkv.shape[1]} numbers are not some heads of queries for {groups} heads of keys of {dim}"
    if any(t.dim() != 2 or t.shape[0] < places or t.shape[1] != dim // 2 for t in (cosines, sines)):
        return f"cosines {tuple(cosines.shape)} or sines {tuple(sines.shape)} are not ({places} or more, {dim // 2})"
    return None


@lru_cache(maxsize=64)
def _function(is_cluster: bool, stages: int, device: torch.device) -> Function:
    return compiled(
        (WORDS, HEADS, _FOLDER / "rope_decode.cu"),
        "rope_decode_attention",
        {"CLUSTERS": int(is_cluster), "STAGES": stages},
        device,
    )
