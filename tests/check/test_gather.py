from __future__ import annotations

import pytest
from tests.evidence_builder import EvidenceBuilder

from flatout.check.gather import gathered, gathered_notes
from flatout.core.records.finding import Finding, Note
from flatout.core.records.workload import LibraryFrame, Source

RUN = EvidenceBuilder()


def below(line: int) -> Source:
    """A line of a library below the user's `trainer.train()`."""
    return RUN.sources[RUN.line("train.py", 12, "trainer.train()", via=(LibraryFrame(file="lib/model.py", line=line),))]


def found(where: Source | None, cost_s: float, *operators: int, edit: str = "set it", saved_bytes: int = 0) -> Finding:
    return Finding(
        rule="a.rule",
        regime="overhead",
        where=where,
        cost_s=cost_s,
        saved_s=(0.5 * cost_s, cost_s),
        because=f"{cost_s:g} s",
        edit=edit,
        operators=operators,
        saved_bytes=saved_bytes,
    )


def test_equal_findings_are_one_at_the_largest_with_the_others_as_further_places() -> None:
    [finding] = gathered([found(below(3), 0.01, 1), found(below(5), 0.03, 2), found(below(7), 0.02, 3)])

    assert finding.where == below(5)
    assert finding.also == (below(7), below(3))
    assert finding.cost_s == pytest.approx(0.06)
    assert finding.saved_s == pytest.approx((0.03, 0.06))
    assert finding.operators == (1, 2, 3)
    assert finding.because == "0.03 s; the largest of 3 alike here, 60.00 ms together"


def test_what_claims_the_same_operators_is_not_counted_twice() -> None:
    findings = gathered([found(below(3), 0.01, 1), found(below(5), 0.03, 1, 2)])

    assert [f.cost_s for f in findings] == [0.03, 0.01]


@pytest.mark.parametrize(
    "other",
    [
        found(below(5), 0.01, 2, edit="another edit"),
        found(RUN.sources[RUN.line("model.py", 12)], 0.01, 2),
        found(below(5), 0.01, 2, saved_bytes=1 << 20),
        found(None, 0.01, 2),
    ],
)
def test_another_edit_line_or_kind_of_cost_stays_on_its_own(other: Finding) -> None:
    assert gathered([found(below(3), 0.03, 1), other]) == [found(below(3), 0.03, 1), other]


def test_notes_that_say_the_same_of_one_line_are_one() -> None:
    notes = [Note(rule="a.rule", where=below(line), text="'item' once a step") for line in (3, 5, 7)]

    [note] = gathered_notes([*notes, notes[0]])

    assert (note.where, note.text) == (below(3), "'item' once a step (and at 2 more places below this line)")
