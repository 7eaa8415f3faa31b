"""Structured pruning: a smaller dense model that runs, exports and compiles, or a refusal by name."""

from __future__ import annotations

from flatout.compression.pruning.blocks import drop_blocks
from flatout.compression.pruning.cutting import apply_pruning
from flatout.compression.pruning.pruning import Pruned, map_state, prune, read_pruning
from flatout.compression.pruning.sparse import Sparsified, sparsify
from flatout.compression.pruning.units import Group

__all__ = [
    "Group",
    "Pruned",
    "Sparsified",
    "apply_pruning",
    "drop_blocks",
    "map_state",
    "prune",
    "read_pruning",
    "sparsify",
]
