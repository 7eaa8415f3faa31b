"""Keys and values of all layers in tensors that never move, with the position on the device.

B batch, N heads of keys, S places, H head dim, T tokens that are new
"""

from __future__ import annotations

import torch
from torch import Tensor

from flatout.core.errors import UsageError


class StaticCache:
    """Room for `max_len` tokens of a batch; `keys` and `values` are [B, N, S, H] for each layer, `position` is int64 [1], the
    number of tokens in it. A tensor for each layer, since a compiler that writes to a part of one tensor may copy it all.

    All sequences of the batch have the same length. Where the position is is known to the device alone: nothing here waits for
    it, and nothing checks that there is room; `decode` counts on the host.
    """

    def __init__(
        self,
        layers: int,
        batch: int,
        heads: int,
        max_len: int,
        head_dim: int,
        *,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cuda",
    ) -> None:
        if min(layers, batch, heads, max_len, head_dim) < 1:
            raise UsageError(f"{(layers, batch, heads, max_len, head_dim)} has a size below 1")
        shape = (batch, heads, max_len, head_dim)
        self.keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(layers)]
        self.values = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(layers)]
        self.max_len = max_len
        self.position = torch.zeros(1, dtype=torch.int64, device=device)
        self._places = torch.arange(max_len, device=device)

    @property
    def num_bytes(self) -> int:
        """Bytes of keys and values: what a step reads whose attention looks at every place."""
        return sum(t.nbytes for t in (*self.keys, *self.values))

    @property
    def state(self) -> tuple[Tensor, ...]:
        """What a step changes, for `Graphed(..., state=cache.state)`."""
        return *self.keys, *self.values, self.position

    def write(self, layer: int, k_BNTH: Tensor, v_BNTH: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of new tokens from the position on; gives those of all places, [B, N, S, H].

        The position stays: `advance` moves it, once all layers have written.
        """
        at = self.places(k_BNTH.shape[2])
        keys, values = self.keys[layer], self.values[layer]
        keys.index_copy_(2, at, k_BNTH.to(keys.dtype))
        values.index_copy_(2, at, v_BNTH.to(values.dtype))
        return keys, values

    def places(self, num: int = 1) -> Tensor:
        """The places [T] of the next `num` tokens. Also their positions, for rotary embeddings."""
        return self.position + self._places[:num]

    def mask(self, num: int = 1) -> Tensor:
        """The attention mask [T, S]: each of the next `num` tokens looks at its own place and those before."""
        return self._places <= self.places(num)[:, None]

    def advance(self, num: int = 1) -> None:
        """The next tokens come after `num` more."""
        self.position.add_(num)

    def reset(self) -> None:
        """Empty; what is in it is never looked at."""
        self.position.zero_()
