"""What verbs return to Python: printed, drawn in a notebook, and saved by the suffix of a path."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.page_reader import Page, check_harmless
from tests.report.test_ladder import NOTHING, TUNED
from tests.report.test_verdict import verdict

from flatout.app.results import ReportedResult
from flatout.app.tune_script import TunedScript
from flatout.app.verify_script import VerifiedChange
from flatout.core.errors import RecordError, UsageError
from flatout.core.records.plan import Tuned, from_toml
from flatout.core.records.record import from_json
from flatout.core.records.verdict import Verdict

pytestmark = pytest.mark.slow

TUNED_SCRIPT = TunedScript(tuned=TUNED)
PROVED = VerifiedChange(verdict=verdict("proved"))


@pytest.mark.parametrize(
    ("result", "words"),
    [(TUNED_SCRIPT, "graph.compile"), (PROVED, "PROVED: equal"), (TunedScript(tuned=NOTHING), "No plan")],
)
def test_a_result_prints_and_draws_its_report(result: ReportedResult, words: str) -> None:
    assert words in str(result)
    assert repr(result) == str(result)
    assert not str(result).endswith("\n")
    assert words in Page(result._repr_html_().encode()).text


def test_a_narrow_terminal_gets_narrow_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    assert max(map(len, str(PROVED).splitlines())) <= 60
    assert max(map(len, PROVED.text().splitlines())) > 60, "a file has its own width"


def test_the_suffix_says_what_is_saved(tmp_path: Path) -> None:
    for suffix in ("json", "html", "md", "txt"):
        PROVED.save(tmp_path / f"verdict.{suffix}")
        TUNED_SCRIPT.save(str(tmp_path / f"tuned.{suffix}"))

    assert from_json((tmp_path / "verdict.json").read_bytes(), Verdict) == PROVED.verdict
    assert from_json((tmp_path / "tuned.json").read_bytes(), Tuned) == TUNED
    assert json.loads(PROVED.json())["outcome"] == "proved"
    for name in ("verdict", "tuned"):
        check_harmless(Page((tmp_path / f"{name}.html").read_bytes()))
        assert (tmp_path / f"{name}.md").read_text().startswith("### flatout: ")
    assert (tmp_path / "verdict.txt").read_text().startswith("PROVED: equal")
    assert (tmp_path / "tuned.html").read_text() == TUNED_SCRIPT.html()


def test_the_plan_is_saved_as_the_command_line_reads_it(tmp_path: Path) -> None:
    TUNED_SCRIPT.save_plan(tmp_path / "plan.toml")
    assert from_toml((tmp_path / "plan.toml").read_bytes()) == TUNED_SCRIPT.plan


@pytest.mark.parametrize("name", ["report.pdf", "report", "report.HTML"])
def test_another_suffix_is_refused_and_nothing_written(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match=r"names no format; end it in one of \.json, \.html, \.md, \.txt"):
        PROVED.save(tmp_path / name)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="nowhere"):
        PROVED.save(tmp_path / "nowhere" / "verdict.json")


def test_a_page_names_the_extra_that_draws_it_and_the_rest_works_without() -> None:
    code = """
import sys
sys.modules["matplotlib"] = None
from tests.app.test_results import PROVED, TUNED_SCRIPT
from tests.evidence_builder import EvidenceBuilder
from flatout.app.session import Checked
from flatout.check.diagnosis import diagnose
from flatout.core.errors import UsageError
assert "graph.compile" in TUNED_SCRIPT._repr_html_() and PROVED.html() and TUNED_SCRIPT.html()
run = EvidenceBuilder()
run.operator("aten.mm", run.line("train.py", 3))
evidence = run.build()
try:
    Checked(evidence=evidence, diagnosis=diagnose(evidence, ())).html()
except UsageError as e:
    print(e)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "matplotlib is not installed; it comes with: pip install 'flatout[html]'\n"
