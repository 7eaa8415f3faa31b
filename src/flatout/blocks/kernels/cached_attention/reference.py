"""One token's attention to a cache: what the other kernels must return."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from flatout.core.parts import kernel

# B batch, N heads of queries, G heads of keys, S places, H head dim


def reference_cached_attention(q_BN1H: Tensor, keys_BGSH: Tensor, values_BGSH: Tensor, position: Tensor) -> Tensor:
    """Attention softmax(q k / sqrt(H)) v over the places from 0 to `position` (int64 [1]): [B, N, 1, H].

    `position` is on the device, and its place is included. N / G heads in a row share keys.
    """
    mask_1S = (torch.arange(keys_BGSH.shape[2], device=keys_BGSH.device) <= position)[None]
    is_grouped = q_BN1H.shape[1] != keys_BGSH.shape[1]
    return F.scaled_dot_product_attention(q_BN1H, keys_BGSH, values_BGSH, attn_mask=mask_1S, enable_gqa=is_grouped)


KERNEL = kernel(__name__, "torch's attention with a mask over all places", reference_cached_attention, order=1000)
