"""Activations of a model's repeated blocks computed again in the backward instead of kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import ceil
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

Undo = Callable[[], None]


def recompute(module: nn.Module, *, fraction: float = 1.0, container: str = "") -> tuple[tuple[str, ...], Undo]:
    """Have the first blocks of a model recomputed in training: paths of those that will be, and how to undo it.

    Blocks are the modules of one class and one set of shapes beside one another in `container` (a path; '' searches for the
    container whose blocks hold most parameters). Random masks are drawn again as they were, and precisions are kept. Blocks that
    count what they see (batch norm's running statistics) would count twice and are left out.

    Raises ValueError for a fraction outside 0..1.
    """
    if not 0.0 <= fraction <= 1.0:
        raise ValueError(f"fraction is {fraction} and must be between 0 and 1")
    blocks = [b for b in blocks_of(module, container) if not _counts(b[1])]
    chosen = blocks[: ceil(fraction * len(blocks))]
    return tuple(path for path, _ in chosen), recompute_blocks([block for _, block in chosen])


def recompute_blocks(blocks: Sequence[nn.Module]) -> Undo:
    """Have these modules recomputed in training; how to undo it."""
    for block in blocks:
        block.forward = _recomputed(block)

    def undo() -> None:
        for block in blocks:
            del block.forward

    return undo


def repeated_blocks(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """All modules that could be recomputed: the outermost that lie beside others of their kind, with their paths, in order."""
    found: list[tuple[str, nn.Module]] = []
    for path, holder in module.named_modules():
        inside = any(path == p or path.startswith(f"{p}.") for p, _ in found)
        found += [] if inside else [b for group in _alike(path, holder) for b in group if not _counts(b[1])]
    return found


def blocks_of(module: nn.Module, container: str = "") -> list[tuple[str, nn.Module]]:
    """The repeated blocks with their paths, in order; empty where there are none."""
    groups = [g for path, holder in module.named_modules() if container in ("", path) for g in _alike(path, holder)]
    return max(groups, key=lambda g: sum(p.numel() for _, b in g for p in b.parameters()), default=[])


def _alike(path: str, holder: nn.Module) -> Iterator[list[tuple[str, nn.Module]]]:
    """Groups of at least two equal children that have parts of their own: one layer alone keeps its input either way."""
    groups: dict[tuple[object, ...], list[tuple[str, nn.Module]]] = {}
    for name, child in holder.named_children():
        shapes = tuple(p.shape for p in child.parameters())
        if shapes and next(child.children(), None) is not None and "forward" not in vars(child):
            groups.setdefault((type(child), shapes), []).append((f"{path}.{name}" if path else name, child))
    yield from (g for g in groups.values() if len(g) > 1)


def _counts(block: nn.Module) -> bool:
    return any(name.rpartition(".")[2] in ("num_batches_tracked", "running_mean") for name, _ in block.named_buffers())


def _recomputed(block: nn.Module) -> Callable[..., Any]:
    original = block.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        if not block.training or not torch.is_grad_enabled():
            return original(*args, **kwargs)
        return checkpoint(original, *args, use_reentrant=False, **kwargs)

    return forward
