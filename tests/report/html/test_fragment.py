"""A report as a part of another page: whole, harmless, and in the colours of the page around it."""

from __future__ import annotations

import pytest
from tests.page_reader import Page, check_harmless, spoiled
from tests.report.html.test_browser import Browser, brightness, browser, contrast
from tests.report.html.test_page import HOSTILE
from tests.report.test_ladder import TUNED
from tests.report.test_verdict import verdict

from flatout.core.records.evidence import Evidence
from flatout.core.records.finding import Diagnosis
from flatout.report.html.fragment import html_fragment
from flatout.report.parts.diagnosis import diagnosis_blocks, short_diagnosis_blocks
from flatout.report.parts.ladder import ladder_blocks
from flatout.report.parts.verdict import verdict_blocks

__all__ = ["browser"]
pytestmark = pytest.mark.slow


def test_the_fragment_is_one_element_that_runs_and_loads_nothing(full: Evidence, diagnosis: Diagnosis) -> None:
    fragment = html_fragment(diagnosis_blocks(full, diagnosis))

    page = Page(fragment.encode())
    check_harmless(page)
    assert fragment.strip().startswith('<div class="flatout-report">')
    assert fragment.strip().endswith("</div>")
    assert "http" not in fragment
    assert not [value for _, name, value in page.attributes if name == "id"], "ids would meet those of another cell"


def test_the_fragment_says_what_the_diagnosis_says(full: Evidence, diagnosis: Diagnosis) -> None:
    text = Page(html_fragment(short_diagnosis_blocks(full, diagnosis)).encode()).text

    for finding in diagnosis.findings:
        assert finding.title in text
        assert finding.because in text
    for words in ("38.2 ms a training step", "model.py:48", "1.3x - 1.4x", "94 %", "backward"):
        assert words in text, words


def test_its_style_touches_nothing_but_itself() -> None:
    fragment = html_fragment(verdict_blocks(verdict("proved")))

    style = fragment.partition("<style>")[2].partition("</style>")[0]
    rules = [rule.rpartition("{")[0].rpartition("}")[2].rpartition("{")[2] for rule in style.split(";")]
    selectors = [one.strip() for rule in rules for one in rule.split(",") if one.strip() and "prefers" not in one]
    assert len(selectors) > 40
    assert [one for one in selectors if ".flatout-report" not in one] == []


def test_a_plan_and_a_verdict_are_drawn_whole() -> None:
    text = Page(html_fragment(ladder_blocks(TUNED)).encode()).text
    assert "graph.compile" in text
    assert "no image | <script>" in text, "what is folded away is there"
    assert "PROVED: equal" in Page(html_fragment(verdict_blocks(verdict("proved"))).encode()).text


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_text_stays_text(full: Evidence, diagnosis: Diagnosis, text: str) -> None:
    check_harmless(Page(html_fragment(diagnosis_blocks(spoiled(full, text), spoiled(diagnosis, text))).encode()))


@pytest.mark.parametrize(
    ("host", "system", "is_dark"),
    [
        ("<body>", "light", False),
        ("<body>", "dark", True),
        ('<body data-jp-theme-light="true">', "dark", False),
        ('<body data-jp-theme-light="false">', "light", True),
        ('<body class="vscode-dark">', "light", True),
        ('<body class="vscode-light">', "dark", False),
    ],
)
def test_it_follows_the_theme_of_the_notebook_and_can_be_read(
    browser: Browser, full: Evidence, diagnosis: Diagnosis, host: str, system: str, is_dark: bool
) -> None:
    fragment = html_fragment(short_diagnosis_blocks(full, diagnosis))

    page = browser.open(f"<!doctype html><meta charset=utf-8>{host}{fragment}".encode(), scheme=system).page

    ground = brightness(page, ".flatout-report", "background-color")
    assert ground < 0.1 if is_dark else ground > 0.8
    for selector in (".title", ".cause .head b", ".where", ".dim", ".source pre", "td", "summary"):
        assert contrast(brightness(page, selector, "color"), ground) >= 4.5, selector
