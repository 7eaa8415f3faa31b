"""Architectures searched under a measured limit, starting from the weights of an existing model."""

from __future__ import annotations

from flatout.shrink.search.costs import Limit
from flatout.shrink.search.search import SearchResult, search_architecture
from flatout.shrink.search.slicing import Inherited, inherit
from flatout.shrink.search.space import Range

__all__ = [
    "Inherited",
    "Limit",
    "Range",
    "SearchResult",
    "inherit",
    "search_architecture",
]
