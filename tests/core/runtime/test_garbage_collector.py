"""Collections are put off, and the collector's state afterwards is what the program made of it."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from flatout.core.runtime.garbage_collector import collections_put_off


@pytest.fixture(autouse=True)
def _collector() -> Iterator[None]:
    yield
    gc.enable()


@pytest.fixture
def collections() -> Iterator[list[int]]:
    """The generation of each collection that starts."""
    started: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            started.append(info["generation"])

    gc.callbacks.append(note)
    yield started
    gc.callbacks.remove(note)


def allocate() -> None:
    """Objects that the collector follows, far more than its threshold."""
    assert len([[n] for n in range(50_000)]) == 50_000


def test_no_collection_starts_inside_and_they_go_on_after_it(collections: list[int]) -> None:
    with collections_put_off():
        allocate()
        inside = len(collections)
    allocate()

    assert inside == 0
    assert collections


def test_one_that_is_asked_for_runs(collections: list[int]) -> None:
    with collections_put_off():
        gc.collect()

    assert collections == [2]


def test_what_the_program_asks_for_inside_holds_after_it() -> None:
    with collections_put_off():
        assert gc.isenabled()
        gc.disable()
        assert not gc.isenabled()
    assert not gc.isenabled()

    gc.enable()
    with collections_put_off():
        gc.disable()
        gc.enable()
    assert gc.isenabled()


def test_nothing_changes_where_it_is_off(collections: list[int]) -> None:
    gc.disable()
    with collections_put_off():
        assert not gc.isenabled()
        gc.enable()
        allocate()

    assert gc.isenabled()
    assert collections


def test_one_inside_another() -> None:
    functions = (gc.disable, gc.enable, gc.isenabled)
    with pytest.raises(RuntimeError), collections_put_off(), collections_put_off():
        raise RuntimeError
    assert (gc.disable, gc.enable, gc.isenabled) == functions
    assert gc.isenabled()
