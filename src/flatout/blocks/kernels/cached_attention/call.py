"""`cached_attention`: the public function, which checks its arguments and selects a kernel."""

from __future__ import annotations

from torch import Tensor

from flatout.blocks.kernels.selection import kernel_operator
from flatout.core.errors import UsageError

_attend = kernel_operator(
    "cached_attention", "(Tensor q, Tensor keys, Tensor values, Tensor position, *, str? kernel) -> Tensor"
)


def cached_attention(
    q_BN1H: Tensor, keys_BGSH: Tensor, values_BGSH: Tensor, position: Tensor, *, kernel: str | None = None
) -> Tensor:
    """Attention softmax(q k / sqrt(H)) v of new tokens over the places of a cache from 0 to `position` (int64 [1]).

    The new token's place is included. For one new token; N / G heads in a row share keys.

    `kernel` is the id of the implementation, by default the first that can
    run: `cached_attention.triton`, `.reference`. Raises UsageError for shapes that do not fit.

    >>> import torch
    >>> q, keys = torch.ones(1, 1, 1, 2), torch.zeros(1, 1, 4, 2)
    >>> cached_attention(q, keys, torch.arange(8.0).view(1, 1, 4, 2), torch.tensor([1]))
    tensor([[[[1., 2.]]]])
    """
    wanted = (q_BN1H.shape[0], keys_BGSH.shape[1], keys_BGSH.shape[2], q_BN1H.shape[3])
    if q_BN1H.dim() != 4 or q_BN1H.shape[2] != 1 or q_BN1H.shape[1] % keys_BGSH.shape[1]:
        raise UsageError(f"q {tuple(q_BN1H.shape)} is not (batch, heads, 1, head dim) with heads for those of keys")
    if keys_BGSH.shape != wanted or values_BGSH.shape != wanted:
        shapes = tuple(keys_BGSH.shape), tuple(values_BGSH.shape)
        raise UsageError(f"keys and values {shapes} do not meet q {tuple(q_BN1H.shape)}; give {wanted}")
    y: Tensor = _attend(q_BN1H, keys_BGSH, values_BGSH, position, kernel=kernel)
    return y
