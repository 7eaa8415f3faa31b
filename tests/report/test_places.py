"""A cause in a library is named by the way from the user's line to it, in every report."""

from __future__ import annotations

import msgspec
import pytest

from flatout.core.records.evidence import Evidence
from flatout.core.records.finding import Diagnosis, HotLine, RankedFinding
from flatout.core.records.workload import LibraryFrame, Source
from flatout.report.html.page import html_report
from flatout.report.markdown import markdown_report
from flatout.report.parts.diagnosis import causes, diagnosis_blocks, short_diagnosis_blocks
from flatout.report.places import chain_of_finding, other_places
from flatout.report.text import plain_text

CALL = "train.py:12 trainer.train()"
TRAINER = LibraryFrame(file="transformers/trainer.py", line=2300, text="loss = model(**inputs)")
ACCELERATE = LibraryFrame(file="accelerate/utils/operations.py", line=800, text="return f(*args)")
BERT = LibraryFrame(file="transformers/models/bert/modeling_bert.py", line=312, text="scores = query @ key.T")


def in_library(diagnosis: Diagnosis, *via: LibraryFrame, also: tuple[Source, ...] = ()) -> RankedFinding:
    return msgspec.structs.replace(
        diagnosis.findings[0], file="/home/ada/train.py", line=12, text="trainer.train()", via=via, also=also
    )


def below(line: int, *, user_line: int = 12) -> Source:
    frame = LibraryFrame(file="transformers/models/bert/modeling_bert.py", line=line)
    return Source(file="/home/ada/train.py", line=user_line, library=frame.place, via=(TRAINER, frame))


@pytest.mark.parametrize(
    ("via", "chain"),
    [
        ((), "train.py:12"),
        ((BERT,), f"{CALL} -> transformers/models/bert/modeling_bert.py:312"),
        ((TRAINER, BERT), f"{CALL} -> transformers/trainer.py:2300 -> .../modeling_bert.py:312"),
        ((TRAINER, ACCELERATE, BERT), f"{CALL} -> transformers/trainer.py:2300 -> .../modeling_bert.py:312"),
        ((TRAINER, ACCELERATE), f"{CALL} -> transformers/trainer.py:2300 -> accelerate/utils/operations.py:800"),
    ],
)  # fmt: skip
def test_the_chain_leads_from_the_users_line_to_the_librarys(
    diagnosis: Diagnosis, via: tuple[LibraryFrame, ...], chain: str
) -> None:
    assert chain_of_finding(in_library(diagnosis, *via), cwd="/home/ada") == chain


def test_every_report_prints_the_chain_and_the_librarys_line(evidence: Evidence, diagnosis: Diagnosis) -> None:
    found = msgspec.structs.replace(diagnosis, findings=(in_library(diagnosis, TRAINER, BERT),))
    text = " ".join(plain_text(diagnosis_blocks(evidence, found), width=200).split())
    markdown = markdown_report(short_diagnosis_blocks(evidence, found))
    page = html_report(evidence, found).decode()

    for report in (text, markdown, page.replace("&gt;", ">")):
        assert f"{CALL} -> transformers/trainer.py:2300 -> .../modeling_bert.py:312" in report
    assert "scores = query @ key.T" in text
    assert "scores = query @ key.T" in markdown


def test_further_places_are_each_named_once_and_of_many_a_few(evidence: Evidence, diagnosis: Diagnosis) -> None:
    also = (below(312), *(below(line) for line in range(400, 432)), below(400))
    finding = in_library(diagnosis, TRAINER, BERT, also=also)

    places = other_places(finding, cwd="/home/ada")

    assert places[0] == "transformers/models/bert/modeling_bert.py:400"
    assert (len(places), places[-1]) == (6, "and 27 more")
    [cause] = causes(evidence, msgspec.structs.replace(diagnosis, findings=(finding,)))
    assert len(cause.also) == 6


def test_another_line_of_the_users_is_named_with_how_much_lies_below_it(diagnosis: Diagnosis) -> None:
    finding = in_library(diagnosis, TRAINER, BERT, also=(below(3, user_line=20), below(4, user_line=20)))

    assert other_places(finding, cwd="/home/ada") == ("train.py:20 (2 lines below it)",)


def test_a_hot_line_of_a_library_is_named_as_such(evidence: Evidence, diagnosis: Diagnosis) -> None:
    line: HotLine = msgspec.structs.replace(diagnosis.hot_lines[0], source=below(312))
    found = msgspec.structs.replace(diagnosis, hot_lines=(line,))

    assert "modeling_bert.py:312" in plain_text(diagnosis_blocks(evidence, found), width=200)
    assert "modeling_bert.py:312" in html_report(evidence, found).decode()
