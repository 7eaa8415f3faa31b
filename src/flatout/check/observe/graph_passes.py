"""The backward passes that go through the graph of a result: they decide whether one result could serve two uses."""

from __future__ import annotations

from typing import Any, Literal

import torch

from flatout.core.tensors.nests import tensors_in

Reuse = Literal["", "detach", "no-graph", "freed"]
"""How the first of two equal results can stand for the second: '' as it is; 'detach' with a `.detach()`, its graph is gone but
nobody needs it; 'no-graph' if it were computed with a graph; 'freed' not at all, since the first backward frees the graph that
the second needs."""


class GraphPasses:
    """The backward passes that went through a result so far; `has_graph` says whether any could."""

    def __init__(self, result: Any) -> None:
        self.passes: set[int] = set()
        self.has_graph = False
        for tensor in tensors_in(result):
            if tensor.grad_fn is not None:
                self.has_graph = True
                tensor.grad_fn.register_prehook(self._pass)

    def reuse(self, later: GraphPasses) -> Reuse:
        """How this result could stand for an equal one that was computed later; ask when the step is over."""
        if not later.passes:
            return "detach" if self.passes else ""
        if not self.has_graph:
            return "no-graph"
        return "freed" if len(self.passes | later.passes) > 1 else ""

    def _pass(self, *_: object) -> None:
        self.passes.add(torch._C._current_graph_task_id())
