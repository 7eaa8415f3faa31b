"""Which of several processes this one is."""

from __future__ import annotations

from typing import NamedTuple


class Place(NamedTuple):
    """The rank of this process and the number of ranks, as their launcher says."""

    rank: int
    world_size: int
