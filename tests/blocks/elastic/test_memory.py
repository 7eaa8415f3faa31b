"""When copies in memory are written: never over what another rank still needs."""

from __future__ import annotations

from pathlib import Path
from time import sleep
from typing import Any

import pytest
from torch import nn

from flatout.blocks.elastic.memory import MemoryCopies, copies_on_node
from flatout.blocks.elastic.messages import HeartbeatPage, RankContext

pytestmark = pytest.mark.slow


class Slow(MemoryCopies):
    """Whose exchange with its buddy takes a while."""

    def _exchange(self, slot: Any) -> None:
        sleep(0.2)


def slow_copies(tmp_path: Path, **options: Any) -> tuple[Slow, RankContext]:
    rank_context = RankContext(
        job="j" * 32,
        restart=0,
        node=0,
        row=0,
        memory=tmp_path,
        heartbeats=HeartbeatPage(tmp_path / "m", 1),
        restart_s=None,
    )
    return Slow(rank_context, rank=0, num_ranks=2, group=None, buddies=[1, 0], **options), rank_context


def parts() -> dict[str, Any]:
    return {"net": nn.Linear(3, 5)}


def test_ranks_meet_before_an_older_state_is_written_over(tmp_path: Path) -> None:
    observed: list[set[int]] = []
    copies, context = slow_copies(
        tmp_path, meet=lambda: observed.append({one.step for one in copies_on_node(context).copies})
    )
    for step in (1, 2, 3, 4):
        copies.write(step, parts())
    copies.close()
    assert observed == [set(), {1}, {1, 2}, {2, 3}]


def test_a_copy_goes_on_beside_a_step_that_takes_longer_and_not_beside_a_short_one(tmp_path: Path) -> None:
    copies, _ = slow_copies(tmp_path)
    going_on = []
    for step, step_s in ((1, 60.0), (2, 60.0), (3, 0.1)):  # at first it is not known what a copy takes
        copies.write(step, parts(), step_s)
        going_on.append(copies._pending is not None)
    copies.close()
    assert going_on == [False, True, False]
