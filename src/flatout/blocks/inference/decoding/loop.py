"""Tokens one after the other, without a word between host and device until the last."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from flatout.blocks.inference.decoding.cuda_graph import Compiling, Graphed
from flatout.blocks.inference.decoding.static_cache import StaticCache
from flatout.core.errors import UsageError

# B batch, S places


class Decoder:
    """`step(tokens [B]) -> next tokens [B]`, which writes to `cache` at its position, as one graph that also counts and collects.

    The step chooses the next token on the device (argmax, or torch.multinomial without the host); it does not advance the
    cache. Refusals are those of `Graphed`, whose `is_captured` and `why_not` are those of `graphed`.
    """

    def __init__(
        self, step: Callable[[Tensor], Tensor], cache: StaticCache, *, batch: int, compile: Compiling = "no"
    ) -> None:
        device = cache.position.device
        self.cache = cache
        self._tokens = torch.zeros((batch, cache.max_len), dtype=torch.int64, device=device)

        def whole(token_B: Tensor) -> Tensor:
            next_B = step(token_B)
            self._tokens.index_copy_(1, cache.position, next_B.view(-1, 1))
            token_B.copy_(next_B)
            cache.advance()
            return token_B

        first = torch.zeros(batch, dtype=torch.int64, device=device)
        self.graphed = Graphed(whole, (first,), state=(*cache.state, self._tokens), compile=compile)
        self._token: Tensor = self.graphed.inputs[0]

    def __call__(self, tokens_B: Tensor, *, num: int, length: int) -> Tensor:
        """The next `num` tokens [B, num] after `tokens_B`, of which the cache holds `length` before; on the device, unread.

        `length` is the host's count, given so that nothing must be read. Raises UsageError where there is no room.
        """
        if length < 0 or num < 1 or length + num > self.cache.max_len:
            raise UsageError(
                f"{length} tokens and {num} more do not go into {self.cache.max_len} places; make a longer cache"
            )
        with torch.no_grad():
            self.cache.position.fill_(length)
            self._token.copy_(tokens_B)
            for _ in range(num):
                self.graphed(self._token)
        return self._tokens[:, length : length + num].clone()
