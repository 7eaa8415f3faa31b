"""Blocks of a laid out model that are computed again in the backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


def recompute_within(blocks: Sequence[nn.Module], within: Callable[[], AbstractContextManager[None]]) -> None:
    """Have blocks recomputed in the backward; `within` is entered for a forward, the first and the second."""
    for block in blocks:
        block.forward = _recomputed(block.forward, within)


def _recomputed(original: Callable[..., Any], within: Callable[[], AbstractContextManager[None]]) -> Callable[..., Any]:
    def inside(*args: Any, **kwargs: Any) -> Any:
        with within():
            return original(*args, **kwargs)

    def forward(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return original(*args, **kwargs)
        return checkpoint(inside, *args, use_reentrant=False, **kwargs)

    return forward
