"""What torch.compile keeps for the backward: less, by operators that are cheap to compute again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from torch._functorch import config

from flatout.core.runtime.patches import set_attributes

_NEEDED: Final = "ban_recompute_materialized_backward"
_CHAINS: Final = ("ban_recompute_used_far_apart", "ban_recompute_long_fusible_chains")


def recompute_cheap_operators(*, chains: bool = True) -> Callable[[], None]:
    """Have what is compiled from now on compute pointwise operators again in the backward where that keeps less memory.

    By default torch.compile keeps the result of such an operator where its inputs lie far behind or come through a long chain, or
    where the backward needs it in memory (for a matrix product): three rules of thumb of its partitioner
    (torch/_functorch/partitioners.py, `MinCutOptions`), which go here. Products, convolutions, attention, reductions and random
    numbers are kept as before. Numbers that are computed again are not rounded to 16 bits on the way where the forward's were.

    Without `chains` only the last of the rules goes: it keeps most of the bytes (a Llama-like model 0.61 of them in place of
    0.56), and sums of residuals, which a chain through all layers leads to, are not computed again.

    Returns:
        What restores the rules; code that was compiled meanwhile stays as it is.
    """
    return set_attributes(config, **dict.fromkeys((_NEEDED, *(_CHAINS if chains else ())), False))
