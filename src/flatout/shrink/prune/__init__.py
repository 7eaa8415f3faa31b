"""Structured pruning: a smaller dense model that runs, exports and compiles, or a refusal by name."""

from __future__ import annotations

from flatout.shrink.prune.blocks import drop_blocks
from flatout.shrink.prune.pruning import Pruned, map_state, prune, read_pruning
from flatout.shrink.prune.sparse import Sparsified, sparsify
from flatout.shrink.prune.surgery import apply_pruning
from flatout.shrink.prune.units import UnitGroup

__all__ = [
    "Pruned",
    "Sparsified",
    "UnitGroup",
    "apply_pruning",
    "drop_blocks",
    "map_state",
    "prune",
    "read_pruning",
    "sparsify",
]
