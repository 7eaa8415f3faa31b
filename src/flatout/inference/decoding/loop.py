"""Tokens one after the other, without a word between host and device until the last."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from flatout.errors import UsageError
from flatout.inference.decoding.graphed import Compiling, Graphed
from flatout.inference.decoding.static_cache import StaticCache
from flatout.records.streaming import DecodeRate

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
        self._made = torch.zeros((batch, cache.max_len), dtype=torch.int64, device=device)

        def whole(token_B: Tensor) -> Tensor:
            made = step(token_B)
            self._made.index_copy_(1, cache.position, made.view(-1, 1))
            token_B.copy_(made)
            cache.advance()
            return token_B

        first = torch.zeros(batch, dtype=torch.int64, device=device)
        self.graphed = Graphed(whole, (first,), state=(*cache.state, self._made), compile=compile)
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
        return self._made[:, length : length + num].clone()


def decode(
    step: Callable[[Tensor], Tensor],
    tokens_B: Tensor,
    cache: StaticCache,
    *,
    num: int,
    length: int,
    compile: Compiling = "no",
) -> Tensor:
    """Capture and decode at once: see `Decoder`, which is to be kept where more is decoded."""
    return Decoder(step, cache, batch=tokens_B.shape[0], compile=compile)(tokens_B, num=num, length=length)


def rate_of(
    step_s: float, *, batch: int, weight_bytes: int, cache_bytes: int, bandwidth_bytes_per_s: float
) -> DecodeRate:
    """A measured step beside its bound: weights and cache read once at the device's bandwidth of a copy.

    >>> rate_of(0.01, batch=2, weight_bytes=3_000_000, cache_bytes=1_000_000, bandwidth_bytes_per_s=1e9).bound_fraction
    0.4
    """
    bound_s = (weight_bytes + cache_bytes) / bandwidth_bytes_per_s
    return DecodeRate(
        tokens_per_s=batch / step_s,
        step_s=step_s,
        weight_bytes=weight_bytes,
        cache_bytes=cache_bytes,
        bandwidth_bytes_per_s=bandwidth_bytes_per_s,
        bound_s=bound_s,
        bound_fraction=bound_s / step_s,
    )
