"""Architectures searched under a measured limit, starting from the weights of the model that is given."""

from __future__ import annotations

from flatout.compression.searching.costs import Limit
from flatout.compression.searching.intervals import mean_interval, paired_difference
from flatout.compression.searching.search import Found, search
from flatout.compression.searching.slicing import Inherited, inherit
from flatout.compression.searching.space import Range

__all__ = ["Found", "Inherited", "Limit", "Range", "inherit", "mean_interval", "paired_difference", "search"]
