from __future__ import annotations

from xml.etree import ElementTree

import msgspec
import pytest

from flatout.core.records.record import from_json, to_json
from flatout.core.records.shrink import Point, Shrunk, Untried, Where
from flatout.core.records.verdict import Equality, Speed, Verdict
from flatout.report.html.shrink import shrunk_page, shrunk_svg
from flatout.report.parts.shrink import shrunk_blocks
from flatout.report.text import plain_lines

GIVEN = Point(name="as it is", call_s=(2e-3, 2e-3, 2e-3), num_bytes=4 << 20, metric=0.98)
FAST = Point(
    name="prune 50% + <b>",
    call_s=(1e-3, 1e-3, 1e-3),
    faster=(2.0, 1.9, 2.1),
    num_pairs=11,
    num_bytes=1 << 20,
    metric=0.975,
    lost=0.005,
    lost_range=(-0.003, 0.013),
    notes=("half of the parameters stay",),
)
BAD = msgspec.structs.replace(FAST, name="prune 90%", metric=0.5, lost=0.48, lost_range=None)
VERDICT = Verdict(
    before="as it is",
    after=FAST.name,
    equality=Equality(guarantee="quality", holds=True, because="metric 0.98 -> 0.975"),
    speed=Speed(ratio=2.0, low=1.9, high=2.1, num_pairs=11, before_s=2e-3, after_s=1e-3),
    outcome="proved",
    because="",
    device="cpu",
    torch="2.13",
    python="3.11",
)
FOUND = Shrunk(
    model="m:make",
    objective="latency",
    allowed_loss=0.0098,
    is_cost=False,
    points=(GIVEN, FAST, BAD),
    untried=(Untried(name="native", because="no compiler"),),
    pareto=(FAST.name, "as it is"),
    selected=FAST.name,
    because="shortest call of 1",
    verdict=VERDICT,
    where=Where(processor="a processor", torch="2.13", num_threads=1),
)


def test_the_table_marks_what_was_chosen_and_what_lost_too_much() -> None:
    lines = plain_lines(shrunk_blocks(FOUND))
    (selected,) = [line for line in lines if line.startswith(">  prune 50%")]
    assert "2.00x 1.90..2.10" in selected
    (bad,) = [line for line in lines if "prune 90%" in line]
    assert bad.endswith("!")
    assert "  native: no compiler" in lines
    assert "  2.00x faster a call (1.90 .. 2.10, 11 pairs): 2.00 ms -> 1.00 ms" in lines
    assert "  4.00x fewer bytes: 4.00 MiB -> 1.00 MiB" in lines


def test_a_model_that_stays_as_it_is_is_told_so() -> None:
    kept = msgspec.structs.replace(FOUND, selected="as it is", because="nothing is better than the model as it is")
    assert plain_lines(shrunk_blocks(kept))[-1] == "Keep the model as it is: nothing is better than the model as it is."


@pytest.mark.slow
@pytest.mark.parametrize("is_cost", [False, True])
def test_the_picture_names_every_point_and_escapes_what_users_wrote(is_cost: bool) -> None:
    found = msgspec.structs.replace(FOUND, is_cost=is_cost)
    text = ElementTree.tostring(ElementTree.fromstring(str(shrunk_svg(found))), encoding="unicode", method="text")
    assert all(p.name in text for p in found.points)
    assert b"<b>" not in shrunk_page(found)


def test_the_report_goes_to_json_and_back() -> None:
    assert from_json(to_json(FOUND), Shrunk) == FOUND


def test_a_byte_more_or_less_is_no_gain() -> None:
    same = msgspec.structs.replace(FAST, num_bytes=(4 << 20) + 100)
    lines = plain_lines(shrunk_blocks(msgspec.structs.replace(FOUND, points=(GIVEN, same))))
    assert "  about as many bytes: 4.00 MiB -> 4.00 MiB" in lines
    larger = msgspec.structs.replace(FAST, num_bytes=8 << 20)
    lines = plain_lines(shrunk_blocks(msgspec.structs.replace(FOUND, points=(GIVEN, larger))))
    assert "  2.00x as many bytes: 4.00 MiB -> 8.00 MiB" in lines
