"""The method that most want: `optimizer = AdamW(lora(model).parameters())`; `adapt` takes all of them as records."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from flatout.core.records.adapt import Lora
from flatout.shrink.adapt.adapted_model import Adapted, adapt


def lora(
    model: nn.Module,
    *,
    rank: int | None = 8,
    targets: Sequence[str] | None = None,
    alpha: float | None = None,
    is_dora: bool = False,
    dropout: float = 0.0,
    budget: int | None = None,
    name: str = "default",
    seed: int | torch.Generator = 0,
) -> Adapted:
    """Train low-rank pairs beside frozen weights; the outputs are at first the plain model's, bit for bit.

    Args:
        model: Any module; it is changed in place until `undo`.
        rank: Rank of the pairs; None: the largest power of two up to 64 whose pairs fit into `budget`.
        targets: Patterns of module paths; None: by the rule of `flatout.shrink.adapt.targets`.
        alpha: The product is multiplied by alpha / rank; None: the rank.
        is_dora: Also learn the length of each row of the weight (DoRA).
        dropout: Fraction of the pair's inputs that training drops, for linear layers and convolutions.
        budget: The most parameters to train.
        name: Name of the adapter.
        seed: Start of the random numbers that are drawn.

    Returns:
        The model with its adapter; `parameters()` are for the optimizer.

    Raises:
        UsageError: A named layer cannot be adapted, or none is left.

    >>> model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    >>> lora(model, rank=None, budget=3000).trained.rank
    8
    """
    method = Lora(
        rank=rank,
        targets=None if targets is None else tuple(targets),
        alpha=alpha,
        is_dora=is_dora,
        dropout=dropout,
        budget=budget,
    )
    return adapt(model, method, name=name, seed=seed)
