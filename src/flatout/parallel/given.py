"""The layout that a run was started with, for the script that it starts."""

from __future__ import annotations

from typing import Final

from flatout.errors import PlanError
from flatout.parallel.world import World
from flatout.records.scale import Layout

_GIVEN: Final[list[Layout]] = []
"""One, in a process that `flatout run --layout` started."""


def give_layout(layout: Layout) -> None:
    """Have `given_layout` return it in this process."""
    _GIVEN[:] = [layout]


def given_layout(world: World, *, micro_batch: int = 1, global_batch: int = 0) -> Layout:
    """The layout of `flatout run --layout layout.toml train.py`; started otherwise, all ranks hold the whole model.

    The latter with micro-batches of `micro_batch` samples and `global_batch` of them a step (one micro-batch a rank if 0). Raises
    PlanError for a batch that does not divide.
    """
    if _GIVEN:
        return _GIVEN[0]
    ranks = world.num_ranks
    batch = global_batch or ranks * micro_batch
    if batch % (ranks * micro_batch):
        raise PlanError(f"a global batch of {batch} is no multiple of {ranks} ranks x {micro_batch} samples")
    return Layout(data=ranks, micro_batch=micro_batch, global_batch=batch)
