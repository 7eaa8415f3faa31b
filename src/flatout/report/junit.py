"""Results as JUnit XML, which CI systems read: one suite, a case for each thing that was judged."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final, Literal, NamedTuple
from xml.etree import ElementTree

from flatout.report.sanitise import inert_code

Result = Literal["passed", "failed", "error", "skipped"]

_ELEMENTS: Final[dict[Result, str]] = {"failed": "failure", "error": "error", "skipped": "skipped"}
_COUNTS: Final[dict[str, Result]] = {"failures": "failed", "errors": "error", "skipped": "skipped"}
_NO_XML: Final = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that no XML 1.0 document may hold, not even escaped (https://www.w3.org/TR/xml/#charsets)."""


class JunitCase(NamedTuple):
    """One thing that was judged: `message` says in a sentence why it did not pass, `text` is all there is to say of it."""

    name: str
    result: Result
    text: str
    message: str = ""
    seconds: float = 0.0


def junit_report(suite: str, cases: Sequence[JunitCase]) -> bytes:
    """One suite of these cases as JUnit XML (UTF-8), of the elements and attributes that pytest's own has."""
    root = ElementTree.Element("testsuites")
    counts = {name: str(sum(case.result == result for case in cases)) for name, result in _COUNTS.items()}
    seconds = _decimal(sum(case.seconds for case in cases))
    totals = {"name": suite, "tests": str(len(cases)), **counts, "time": seconds}
    box = ElementTree.SubElement(root, "testsuite", totals)
    for case in cases:
        named = {"classname": suite, "name": _clean(case.name), "time": _decimal(case.seconds)}
        element = ElementTree.SubElement(box, "testcase", named)
        text = "\n".join(map(_clean, case.text.splitlines()))
        if case.result == "passed":
            ElementTree.SubElement(element, "system-out").text = text
        else:
            why = ElementTree.SubElement(element, _ELEMENTS[case.result], message=_clean(case.message))
            why.text = text
            if case.result != "skipped":
                why.set("type", case.result)
    ElementTree.indent(root)
    return bytes(ElementTree.tostring(root, encoding="utf-8", xml_declaration=True)) + b"\n"


def _clean(line: str) -> str:
    return _NO_XML.sub("", inert_code(line))


def _decimal(seconds: float) -> str:
    """Seconds without an exponent, which some readers do not take."""
    return f"{seconds:.6f}"
