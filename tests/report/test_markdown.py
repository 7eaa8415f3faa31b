"""The report for a pull request."""

from __future__ import annotations

import html
import re
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.page_reader import spoiled

from flatout.core.records.evidence import Evidence
from flatout.core.records.finding import Diagnosis
from flatout.report.document import Column, Fold, Table
from flatout.report.markdown import code, markdown_report, plain
from flatout.report.parts.diagnosis import short_diagnosis_blocks
from flatout.report.sanitise import CodeText

change = msgspec.structs.replace
Golden = Callable[[str, str], None]


def test_a_slow_step(evidence: Evidence, diagnosis: Diagnosis, golden: Golden) -> None:
    golden("slow-markdown", markdown_report(short_diagnosis_blocks(evidence, diagnosis)))


def test_a_fast_step(evidence: Evidence, diagnosis: Diagnosis, golden: Golden) -> None:
    fast = change(
        diagnosis, findings=(), notes=(), floor_s=0.0318, unexplained_s=0.002, explained_s=0.0, refused=(), parts=()
    )

    golden("fast-markdown", markdown_report(short_diagnosis_blocks(evidence, fast)))


def test_hostile_text_stays_text(evidence: Evidence, diagnosis: Diagnosis, golden: Golden) -> None:
    text = (
        "<script>x</script> **b** `c` ```d``` [l](http://e.example) @ada #12 | ![i](www.e.example) \x1b[31m\udcff\n# h"
    )

    hostile = spoiled(diagnosis, text)
    *causes, last = hostile.findings
    causes = [msgspec.structs.replace(f, advice="") for f in causes]
    hostile = msgspec.structs.replace(hostile, findings=(*causes, last))  # the last one is advice

    golden("hostile-markdown", markdown_report(short_diagnosis_blocks(spoiled(evidence, text), hostile)))


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("1. one", "1\\. one"),
        ("3) three", "3\\) three"),
        ("- item", "\\- item"),
        ("+ item", "\\+ item"),
        ("a - b, 3.5 ms", "a - b, 3.5 ms"),
        ("a*b_c", "a\\*b\\_c"),
        ("mail@host", "mail@<!-- -->host"),
        ("https://x.example", "https<!-- -->://x.example"),
        ("fixes #7", "fixes \\#<!-- -->7"),
        ("a\nb", "a b"),
    ],
)
def test_marks_lose_their_meaning(text: str, shown: str) -> None:
    assert plain(text) == shown


@pytest.mark.slow
@settings(max_examples=200)
@given(st.text(st.characters(), max_size=60) | st.text("<>`&#@|[]()*_ \n\\ahtps:/w.", max_size=40))
def test_no_text_opens_an_element_or_ends_a_code_span(text: str) -> None:
    shown = plain(text).replace("<!-- -->", "")
    assert "<" not in shown
    assert "\n" not in shown

    span = code(text)
    fence = span[: len(span) - len(span.lstrip("`"))]
    assert fence and span.endswith(fence)
    assert fence not in span[len(fence) : -len(fence)].replace("`" * (len(fence) + 1), "")


@pytest.mark.parametrize(
    "text", ["rows[0] # `a_b` | c", "a & b < c > d", 'print("&lt;b&gt; &amp;")', "~~x~~ $y$ @ada \\n *z*"]
)
def test_code_in_a_table_is_escaped_once(text: str) -> None:
    page = markdown_report([Table([Column("code")], [[CodeText(text)]])])

    [shown] = re.findall("<code>(.*)</code>", page)
    assert html.unescape(shown) == text
    assert not set(re.sub("&#?[a-z0-9]+;", "", shown)) & set("\\`*_[]<>|#@~$&")


def test_the_title_of_what_is_folded_cannot_become_markup() -> None:
    assert "<summary>a &lt;b&gt; &amp; c</summary>" in markdown_report([Fold("a <b> & c", ["text"])])


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(st.characters(), max_size=60))
def test_no_text_breaks_the_report(evidence: Evidence, diagnosis: Diagnosis, text: str) -> None:
    markdown_report(short_diagnosis_blocks(spoiled(evidence, text), spoiled(diagnosis, text))).encode()
