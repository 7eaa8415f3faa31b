"""The phases as one bar."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatout.report.bars import LOOKS, PhaseBar, _cells

Render = Callable[..., str]


@given(st.lists(st.floats(min_value=1e-9, max_value=1e3), min_size=1, max_size=7), st.integers(7, 200))
def test_cells_fill_the_width_exactly(values: list[float], width: int) -> None:
    cells = _cells(values, width=width)

    assert sum(cells) == width
    assert min(cells) >= 0


@pytest.mark.slow
@given(st.lists(st.floats(min_value=1e-3, max_value=1), min_size=1, max_size=7))
def test_a_phase_that_is_due_half_a_cell_is_drawn(values: list[float]) -> None:
    cells = _cells(values, width=76)

    assert all(have > 0 for have, value in zip(cells, values, strict=True) if value / sum(values) * 76 >= 0.5)


@pytest.mark.parametrize("fill", ["fill", "ascii_fill"])
def test_every_phase_has_a_fill_of_its_own(fill: str) -> None:
    assert len({getattr(look, fill) for look in LOOKS.values()}) == len(LOOKS)


def test_phases_stand_in_the_order_of_a_step(render: Render) -> None:
    bar = render(PhaseBar({"backward": 1.0, "other": 1.0, "data": 1.0}), width=80, encoding="ascii").splitlines()[0]

    assert bar == "." * 27 + "=" * 27 + "-" * 26


def test_a_phase_without_time_is_left_out(render: Render) -> None:
    shown = render(PhaseBar({"forward": 1.0, "backward": 0.0}))

    assert "forward" in shown
    assert "backward" not in shown


def test_a_phase_of_an_unknown_name_is_shown_inert(render: Render) -> None:
    shown = render(PhaseBar({"forward": 1.0, "[bold]\x1b[31mall-reduce": 1.0}))

    assert "? [bold]all-reduce" in shown


def test_no_phases_draw_nothing(render: Render) -> None:
    assert render(PhaseBar({})) == ""
