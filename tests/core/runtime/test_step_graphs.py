from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from flatout.check.observe.steps.optimizers import Optimizing
from flatout.core.runtime.own_calls import own_calls
from flatout.core.runtime.patches import Patches
from flatout.core.runtime.source_sites import Sites
from flatout.core.runtime.step_graphs import StepGraphs, is_step_captured, note_backward


class Graph:
    """A graph as torch's, on a CPU: what is captured is what the test says."""

    def __init__(self) -> None:
        self.replays = 0

    def capture_begin(self) -> None:
        pass

    def capture_end(self) -> None:
        pass

    def replay(self) -> None:
        self.replays += 1


class Steps:
    """Counts what the watch of optimizers reports."""

    def __init__(self) -> None:
        self.num_starts = self.num_ends = self.num_backwards = 0

    def on_optimizer_start(self) -> None:
        self.num_starts += 1

    def on_optimizer_end(self, optimizer: int, *, is_border: bool, leader_changed: bool) -> None:
        self.num_ends += is_border

    def on_unwatched_steps(self) -> None: ...

    def on_leader_lost(self, *, is_replaced: bool) -> None: ...

    def on_closure_start(self) -> None: ...

    def on_closure_end(self) -> None: ...

    def on_backward_replayed(self) -> None:
        self.num_backwards += 1


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Iterator[Steps]:
    """What is reported while torch's graphs are the stand-ins."""
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # the stand-in captures on no stream
    steps, patches = Steps(), Patches()
    watch = Optimizing(Sites(user_root=None), steps)
    watch.install(patches)
    watch.is_active = True
    yield steps
    watch.remove()
    patches.undo()
    assert "replay" in vars(Graph) and not is_step_captured()


@pytest.fixture
def update() -> Callable[[], None]:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()

    return step


def test_replays_of_a_step_count_as_steps_and_its_capture_does_not(steps: Steps, update: Callable[[], None]) -> None:
    for _ in range(3):
        update()
    graph = Graph()
    graph.capture_begin()
    update()
    graph.capture_end()
    assert (steps.num_starts, steps.num_ends) == (3, 3)

    for _ in range(5):
        graph.replay()
    assert (steps.num_starts, steps.num_ends, graph.replays) == (8, 8, 5)
    assert not steps.num_backwards, "the optimizer's step is the step"


def test_a_graph_with_a_backward_alone_tells_of_that(steps: Steps) -> None:
    graph, other = Graph(), Graph()
    graph.capture_begin()
    note_backward()  # as what stands in for torch.autograd.backward does
    graph.capture_end()
    other.capture_begin()
    other.capture_end()
    for one in (graph, other, graph):
        one.replay()
    assert (steps.num_backwards, steps.num_ends) == (2, 0)


def test_graphs_that_flatout_captures_are_not_watched(steps: Steps, update: Callable[[], None]) -> None:
    graph = Graph()
    with own_calls():
        graph.capture_begin()
        assert not is_step_captured()
        graph.capture_end()
    graph.replay()
    assert (steps.num_starts, steps.num_backwards, graph.replays) == (0, 0, 1)


def test_another_type_of_graph_can_be_watched_and_is_left_as_it_was() -> None:
    patches, calls = Patches(), list[str]()
    watch = StepGraphs(
        before_step=lambda _: calls.append("before"),
        after_step=lambda _: calls.append("after"),
        on_backward=lambda: calls.append("backward"),
    )
    before = Graph.replay
    watch.install(patches, Graph)
    assert Graph.replay is not before
    patches.undo()
    assert Graph.replay is before and not calls
