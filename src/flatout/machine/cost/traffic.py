"""The bytes that an operator must move: what it reads and what it writes, each once."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from flatout.machine.cost.flops import short_name

_GATHERS: Final = frozenset(
    ("index", "_unsafe_index", "embedding", "gather", "index_select", "take", "take_along_dim", "masked_select")
)
"""They read of their first tensor what they return, and no more."""
_SCATTERS: Final = re.compile("(_?index_put(_impl)?|index_(add|copy|reduce)|scatter(_add|_reduce)?|put)_")
"""Written in place, they touch of their first tensor what their last one has."""
_FILLS: Final = frozenset(
    ("copy_", "fill_", "zero_", "normal_", "uniform_", "random_", "bernoulli_", "exponential_", "geometric_")
)
"""They write over their first tensor without reading it."""


def operator_traffic(name: str, inputs: Sequence[int], outputs: Sequence[int]) -> int:
    """Bytes read and written by one call, from the sizes in bytes of its tensors in their order.

    >>> operator_traffic("aten.add", [8, 8], [8])
    24
    >>> operator_traffic("aten.embedding", [4_000_000, 16], [1024]), operator_traffic("aten.zero_", [8], [8])
    (2064, 8)
    """
    short, rest = short_name(name), sum(inputs[1:])
    if short in _GATHERS:
        return rest + 2 * sum(outputs)
    if _SCATTERS.fullmatch(short) and len(inputs) > 1:
        return rest + 2 * inputs[-1]
    if short in _FILLS:
        return rest + sum(outputs)
    return sum(inputs) + sum(outputs)
