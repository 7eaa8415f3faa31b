from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatout.blocks.inference.streaming.placement import (
    LayerSizes,
    Timed,
    device_bytes,
    pass_s,
    select_streamed_layers,
    spread,
)
from flatout.core.errors import UsageError

seconds = st.floats(0.01, 10)


@given(st.integers(1, 60), st.data())
def test_streamed_layers_are_as_many_as_asked_and_evenly_apart(num: int, data: st.DataObject) -> None:
    away = data.draw(st.integers(1, num))
    chosen = spread(away, num)
    assert len(set(chosen)) == away and set(chosen) <= set(range(num))
    gaps = [b - a for a, b in zip(chosen, [*chosen[1:], chosen[0] + num], strict=True)]
    assert max(gaps) - min(gaps) <= 1


@given(st.lists(st.integers(1, 100), min_size=1, max_size=20), st.integers(1, 4), st.integers(0, 2500))
def test_what_is_placed_fits_and_one_fewer_would_not(bytes_each: list[int], num_buffers: int, limit: int) -> None:
    sizes = [LayerSizes(n, n, 0) for n in bytes_each]
    try:
        away = select_streamed_layers(sizes, limit_bytes=limit, num_buffers=num_buffers)
    except UsageError:
        assert device_bytes(sizes, range(len(sizes)), num_buffers) > limit
        return
    assert device_bytes(sizes, away, num_buffers) <= limit
    if away:
        fewer = spread(len(away) - 1, len(sizes)) if len(away) > 1 else ()
        assert device_bytes(sizes, fewer, num_buffers) > limit


@given(
    st.lists(st.tuples(seconds, st.one_of(st.none(), seconds), st.booleans()), min_size=1, max_size=12),
    st.integers(1, 4),
)
def test_a_pass_is_never_faster_than_its_bound_and_more_places_never_slow_it(
    layers: list[tuple[float, float | None, bool]], num_buffers: int
) -> None:
    timed = [Timed(*layer) for layer in layers]
    bound = max(sum(t.compute_s for t in timed), sum(t.send_s or 0.0 for t in timed))
    made = pass_s(timed, num_buffers=num_buffers, num_passes=8)
    assert (
        pass_s(timed, num_buffers=num_buffers + 1, num_passes=8)
        <= pass_s(timed, num_buffers=num_buffers, num_passes=8) * 1.6
    )
    assert made <= sum(t.compute_s + (t.send_s or 0.0) for t in timed) * (1 + 1e-9) * 2
    if all(t.send_s is None for t in timed):
        assert made == pytest.approx(bound)


def test_alike_layers_that_are_all_streamed_take_the_larger_of_link_and_compute() -> None:
    for compute_s, send_s in ((1.0, 3.0), (3.0, 1.0), (2.0, 2.0)):
        assert pass_s([Timed(compute_s, send_s)] * 10, num_buffers=2) == pytest.approx(10 * max(compute_s, send_s))


def test_one_place_hides_nothing_unless_it_is_free_once_expanded() -> None:
    assert pass_s([Timed(1.0, 3.0)] * 4, num_buffers=1) == pytest.approx(16.0)
    assert pass_s([Timed(1.0, 3.0, True)] * 4, num_buffers=1) == pytest.approx(12.0)


def test_layers_in_a_row_expose_what_even_ones_hide() -> None:
    even = [Timed(1.0), Timed(1.0, 2.0)] * 4
    in_a_row = [Timed(1.0)] * 4 + [Timed(1.0, 2.0)] * 4
    assert pass_s(even, num_buffers=2) == pytest.approx(8.0)
    assert pass_s(in_a_row, num_buffers=2) == pytest.approx(10.0)
