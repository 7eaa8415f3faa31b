"""JUnit XML: well-formed, counted, and with the elements that readers of it know."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatout.report.junit import JunitCase, Result, junit_report

CASES = [
    JunitCase("step", "failed", "all of it\nsecond line", "slower & <worse>", 0.1),
    JunitCase("phase: forward", "passed", "as before", seconds=0.05),
    JunitCase("speed", "error", "report", "cannot tell"),
    JunitCase("memory", "skipped", "report", "not compared", 1e-7),
]


ATTRIBUTES = {
    "testsuites": {"name", "time", "tests", "failures", "errors"},
    "testsuite": {"name", "tests", "failures", "errors", "skipped", "time", "timestamp", "hostname", "id", "package"},
    "testcase": {"name", "time", "classname"},
    "failure": {"message", "type"},
    "error": {"message", "type"},
    "skipped": {"message", "type"},
    "system-out": set(),
}
"""Elements and attributes that the strictest reader knows, which is Jenkins' xUnit plug-in: it holds a file against junit-10.xsd
(https://github.com/jenkinsci/xunit-plugin, src/main/resources/org/jenkinsci/plugins/xunit/types/model/xsd)."""


def suite_of(cases: list[JunitCase]) -> ElementTree.Element:
    root = ElementTree.fromstring(junit_report("flatout.compare", cases))
    assert root.tag == "testsuites"
    [suite] = root
    return suite


def test_one_suite_counts_its_cases() -> None:
    suite = suite_of(CASES)

    assert suite.tag == "testsuite"
    assert suite.attrib == {
        "name": "flatout.compare",
        "tests": "4",
        "failures": "1",
        "errors": "1",
        "skipped": "1",
        "time": "0.150000",
    }
    assert [(case.get("classname"), case.get("name")) for case in suite] == [
        ("flatout.compare", case.name) for case in CASES
    ]


def test_everything_in_it_is_known_to_the_strictest_reader() -> None:
    root = ElementTree.fromstring(junit_report("flatout.compare", CASES))

    for element in root.iter():
        assert set(element.attrib) <= ATTRIBUTES[element.tag]
        assert re.fullmatch(r"[0-9]+\.[0-9]+", element.get("time", "0.0"))
    assert all({"name", "tests", "failures", "errors"} <= set(suite.attrib) for suite in root.iter("testsuite"))


@pytest.mark.parametrize(
    ("result", "tag"), [("passed", "system-out"), ("failed", "failure"), ("error", "error"), ("skipped", "skipped")]
)
def test_each_result_has_its_element_with_the_whole_text(result: Result, tag: str) -> None:
    [case] = suite_of([JunitCase("step", result, "first <b>\n  second & last", "because of 'this'")])

    [element] = case
    assert element.tag == tag
    assert element.text == "first <b>\n  second & last"
    assert element.get("message") == (None if result == "passed" else "because of 'this'")


def test_times_have_no_exponent() -> None:
    assert [case.get("time") for case in suite_of(CASES)] == ["0.100000", "0.050000", "0.000000", "0.000000"]


@given(st.text(st.characters(), max_size=60) | st.text("\x00\x08\x1b[31m\ufffe\uffff\ud800]]>&<\"'\r\n\t", max_size=30))
def test_no_text_breaks_the_document(text: str) -> None:
    [case] = suite_of([JunitCase(f"n{text}", "failed", f"t{text}", f"m{text}")])

    [failure] = case
    assert (case.get("name") or "").startswith("n")
    assert (failure.get("message") or "").startswith("m")
