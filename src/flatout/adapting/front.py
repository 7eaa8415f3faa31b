"""The ways to train less, one function each: `optimizer = AdamW(lora(model).parameters())`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from flatout.adapting.adapted import Adapted, adapt
from flatout.records.adapting import BitFit, Bottleneck, Freeze, Lora, Prefix, Prompt

Seed = int | torch.Generator


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
    seed: Seed = 0,
) -> Adapted:
    """Train low-rank pairs beside frozen weights; the outputs are at first the plain model's, bit for bit.

    See records.adapting.Lora for the arguments and adapting.targets for the choice of targets and rank.

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


def bottleneck(
    model: nn.Module, *, width: int = 16, after: Sequence[str] | None = None, name: str = "default", seed: Seed = 0
) -> Adapted:
    """Train small bottlenecks behind modules; the outputs are at first the plain model's, bit for bit."""
    return adapt(model, Bottleneck(width=width, after=None if after is None else tuple(after)), name=name, seed=seed)


def prompt(
    model: nn.Module,
    *,
    at: str | None = None,
    before: str | None = None,
    num_vectors: int = 8,
    cut: str | None = None,
    is_cut: bool = True,
    name: str = "default",
    seed: Seed = 0,
) -> Adapted:
    """Train vectors in front of the tokens that module `at` (an embedding) gives, or that module `before` gets: [B, T, C].

    Where positions are added after the embedding for T tokens, use `before` the blocks. Their outputs are cut off again.
    """
    method = Prompt(num_vectors=num_vectors, after=at, before=before, cut=cut, is_cut=is_cut)
    return adapt(model, method, name=name, seed=seed)


def prefix(
    model: nn.Module,
    *,
    num_vectors: int = 8,
    targets: Sequence[str] | None = None,
    name: str = "default",
    seed: Seed = 0,
) -> Adapted:
    """Train further keys and values of each nn.MultiheadAttention."""
    method = Prefix(num_vectors=num_vectors, targets=None if targets is None else tuple(targets))
    return adapt(model, method, name=name, seed=seed)


def bitfit(model: nn.Module, *, also: Sequence[str] = (), name: str = "default") -> Adapted:
    """Train the biases, and what `also` names, such as a new head."""
    return adapt(model, BitFit(also=tuple(also)), name=name)


def freeze(
    model: nn.Module,
    *,
    keep: Sequence[str] = (),
    last: int | None = None,
    budget: int | None = None,
    name: str = "default",
) -> Adapted:
    """Train what `keep` names, or the last modules; backward ends where nothing before is trained."""
    return adapt(model, Freeze(keep=tuple(keep), last=last, budget=budget), name=name)
