from __future__ import annotations

from collections import UserDict, namedtuple
from collections.abc import Iterator
from threading import active_count, get_ident
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from flatout.blocks.data.batches import Batches
from flatout.blocks.data.feed import Feed
from flatout.blocks.data.prefetch import Prefetch

Pair = namedtuple("Pair", ["x", "y"])


def loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(23), torch.rand(23)), 4, shuffle=True)


@pytest.mark.parametrize("ahead", [1, 2, 50])
@pytest.mark.slow
def test_batches_come_out_in_order_and_none_is_lost(ahead: int) -> None:
    torch.manual_seed(0)
    expected = [batch for _ in range(3) for batch in loader()]
    torch.manual_seed(0)
    found = [batch for _ in range(3) for batch in Prefetch(loader(), ahead=ahead)]
    assert len(found) == len(expected)
    assert all(
        torch.equal(a, b) for one, two in zip(found, expected, strict=True) for a, b in zip(one, two, strict=True)
    )


def test_another_thread_reads() -> None:
    class Source:
        def __iter__(self) -> Iterator[int]:
            for _ in range(2):
                yield get_ident()

    assert get_ident() not in list(Prefetch(Source()))
    assert set(Prefetch(Source(), "cpu")) == {get_ident()}


def test_an_error_comes_out_after_the_batches_before_it() -> None:
    def source() -> Iterator[int]:
        yield 1
        yield 2
        raise OSError("the disk is gone")

    seen: list[int] = []
    with pytest.raises(OSError, match="the disk is gone"):
        for batch in Prefetch(source()):
            seen.append(batch)
    assert seen == [1, 2]


def test_a_loop_that_is_left_leaves_no_thread() -> None:
    before = active_count()
    for batch in Prefetch(range(100)):
        if batch == 3:
            break
    assert active_count() == before


def test_tensors_of_all_kinds_of_nests_are_moved() -> None:
    one = torch.ones(2)
    batch: dict[str, Any] = {"a": [one, "text", 3], "b": (one,), "c": Pair(one, None), "d": UserDict(x=one)}
    [found] = Prefetch([batch], "meta")
    assert found["a"][0].is_meta
    assert found["a"][1:] == ["text", 3]
    assert found["b"][0].is_meta
    assert isinstance(found["c"], Pair)
    assert found["c"].x.is_meta
    assert isinstance(found["d"], UserDict)
    assert found["d"]["x"].is_meta
    assert not one.is_meta
    assert not batch["d"]["x"].is_meta


def test_it_has_the_length_and_the_attributes_of_its_source() -> None:
    source = loader()
    wrapped = Prefetch(source)
    assert len(wrapped) == len(source)
    assert wrapped.dataset is source.dataset
    with pytest.raises(AttributeError):
        _ = wrapped.nothing_of_the_kind


def test_nothing_ahead_is_refused() -> None:
    with pytest.raises(ValueError, match="ahead"):
        Prefetch([1], ahead=0)


@pytest.mark.device
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("numbers", "is_overlapped"), [(1 << 24, True), (16, False)])
@pytest.mark.parametrize("kind", ["thread", "feed"])
def test_what_copies_hide_is_measured_and_copies_that_hide_nothing_stay_in_the_stream(
    kind: str, numbers: int, is_overlapped: bool
) -> None:
    table = torch.arange(40.0)[:, None].expand(40, numbers)
    work = torch.randn(4096, 4096, device="cuda")
    source: Any = (
        Prefetch(iter(table.split(1)), "cuda")
        if kind == "thread"
        else Feed(table, Batches([1] * 40, 1, seed=0), device="cuda")
    )
    seen = []
    for batch in source:
        seen.append(batch[0, 0])
        for _ in range(4 if is_overlapped else 16):
            work = (work @ work) / 64
    assert sorted(torch.stack(seen).tolist()) == list(range(40))
    found = source.copies
    assert found is not None
    assert found.is_overlapped is is_overlapped
    assert 0 <= found.hidden <= 1
    assert found.copy_s > 0
