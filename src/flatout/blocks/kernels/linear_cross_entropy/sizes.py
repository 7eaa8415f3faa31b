"""How many tokens a chunk has, and in what the weight's gradient is summed.

N tokens, D width, V vocabulary, C tokens of a chunk
"""

from __future__ import annotations

import math
from typing import Final

import torch

FEW_CHUNKS: Final = 4
"""A sum of so many parts is kept in a 16-bit dtype. It is rounded three times more than one product: its error grows by a
factor of sqrt(1 + (1 + 2 + 3) / 4) = 1.6 when parts are alike and independent, since the sum after k of 4 parts is rounded at
its own size, sqrt(k / 4) of the whole."""

_LEAST: Final = 1024
_LEAST_SUMMED: Final = 2048
_MOST_SUMMED: Final = 8192
_CPU_LOGITS: Final = 1 << 23
"""Logits of a chunk on a CPU: 32 MiB of float32."""
_CPU_LEAST: Final = 256
"""Smaller chunks read the weight from memory more often: measured on an EPYC core, float32, V = 50257, D = 768, time over the
unfused one's: 1.10 with 64 tokens, 0.93 with 128, 0.92 with 256, 0.88 with 1024; V = 32000, D = 256: 0.5 from 128 on."""


def device_chunk(*, num_tokens: int, width: int) -> int:
    """Tokens of a chunk on a GPU.

    Each chunk reads and writes the whole gradient of the weight, r = 4 bytes an element for 16 bits and 8 for float32, beside
    three products of 2 C D V FLOP. On a device that does q FLOP in the time of a byte (H200, bf16: 788e12 / 4.3e12 = 183), that
    costs at most r q / (6 C) of the products' time: 12 % with C = 1024 and 16 bits, 3 % with 4096; with float32 12 % at 2048 and
    3 % at 8192.

    Unfused, three arrays of N x V 16-bit numbers are alive in the backward pass. A quarter of the tokens, thus one twelfth of
    that, in FEW_CHUNKS parts needs no float32 sum. That one, 4 V D bytes, is affordable from N = 8 D on: N V / 2 bytes, another
    twelfth; the parts are then an eighth of the tokens, within limits.

    >>> device_chunk(num_tokens=16384, width=4096), device_chunk(num_tokens=8192, width=4096)
    (4096, 2048)
    >>> device_chunk(num_tokens=131072, width=4096), device_chunk(num_tokens=300, width=4096)
    (8192, 300)
    """
    if num_tokens >= 8 * width:
        chunk = min(max(math.ceil(num_tokens / 8), _LEAST_SUMMED), _MOST_SUMMED)
    else:
        chunk = max(math.ceil(num_tokens / FEW_CHUNKS), _LEAST)
    # The products' tiles are 128 rows or 256.
    return max(1, min(num_tokens, 128 * math.ceil(chunk / 128)))


def host_chunk(*, num_tokens: int, vocabulary: int) -> int:
    """Tokens of a chunk on a CPU.

    >>> host_chunk(num_tokens=4096, vocabulary=8192), host_chunk(num_tokens=10, vocabulary=100)
    (1024, 10)
    """
    return max(1, min(num_tokens, max(_CPU_LEAST, _CPU_LOGITS // max(1, vocabulary))))


def summed_in(*, num_chunks: int, weight: torch.dtype, product: torch.dtype) -> torch.dtype:
    """The dtype in which the parts of the weight's gradient are summed.

    float16 is summed in float32 always: it comes unscaled (see `gradient`) and would overflow.
    """
    if torch.float64 in (weight, product):
        return torch.float64
    if torch.float32 in (weight, product) or product == torch.float16 or num_chunks > FEW_CHUNKS:
        return torch.float32
    return weight
