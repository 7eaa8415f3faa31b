"""Memory at its peak, who holds it, and what grows from step to step."""

from __future__ import annotations

from typing import Final

from flatout.check.observe.discovery import CollectorEntry
from flatout.check.observe.memory.memory_step import MemoryLook

COLLECTOR: Final = CollectorEntry(MemoryLook, order=1)
"""After the watched calls: its wrappers of gc.collect and empty_cache must be the outer ones, which alone count."""
