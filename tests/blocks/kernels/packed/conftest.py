"""What is noted of graphs that are packed, each test with compilations of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from flatout.blocks.kernels.packed.graphs import compute_packed


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch.manual_seed(0)
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.fixture
def num_products() -> list[int | None]:
    """Of each graph, how many products compute of packed rows."""
    return []


@pytest.fixture
def graphs() -> list[list[str]]:
    """The names of what each graph computes once it is packed."""
    return []


@pytest.fixture(autouse=True)
def noted(monkeypatch: pytest.MonkeyPatch, num_products: list[int | None], graphs: list[list[str]]) -> None:
    def noting(graph: torch.fx.GraphModule, *, pad: int) -> int | None:
        num_products.append(compute_packed(graph, pad=pad))
        graphs.append([getattr(node.target, "__name__", str(node.target)) for node in graph.graph.nodes])
        return num_products[-1]

    monkeypatch.setattr("flatout.blocks.kernels.packed.graphs.compute_packed", noting)
