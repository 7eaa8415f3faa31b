"""The page on notebooks: its cells run in order in one notebook (a stand-in for IPython's shell), as a reader pastes them."""

from __future__ import annotations

import os
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.app.notebook_shell import Shell, in_notebook
from tests.app.session.test_tune import SLOW, quick_search

from flatout.app.session import Checked
from flatout.app.tune_script import TunedScript
from flatout.app.verify_script import VerifiedChange
from flatout.core.records.plan import from_toml
from flatout.report.json_report import read_evidence

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "notebooks.md"
CELLS = re.findall(r"```(?:python|ipython)\n(.*?)```", PAGE.read_text(), re.DOTALL)


@pytest.fixture
def shell(tmp_path: Path, cache_of_this_process: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shell]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache_of_this_process))
    quick_search(monkeypatch)
    monkeypatch.chdir(tmp_path)
    with in_notebook() as found:
        yield found


@pytest.mark.long
def test_the_cells_of_the_page_run_in_order(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(textwrap.dedent(SLOW))

    for cell in CELLS:
        quick = cell.replace('time_budget="5m"', 'time_budget="1s"').replace("observe_s=5", "observe_s=2")
        shell.run_cell(re.sub(r"(flatout\.verify\(.*)\)", r"\1, seconds=2)", quick))

    checked, [of_cell] = shell.user_ns["checked"], shell.shown
    assert isinstance(checked, Checked) and isinstance(of_cell, Checked)
    assert checked.evidence.steps.num_observed > 100
    assert shell.user_ns["page"] == (tmp_path / "report.html").read_text()
    assert shell.user_ns["slowest"] == [finding.title for finding in checked.diagnosis.findings]
    assert of_cell.evidence.steps.num_observed >= 50
    assert read_evidence((tmp_path / "report.json").read_bytes()) == of_cell.evidence
    tuned, verdict = shell.user_ns["tuned"], shell.user_ns["verdict"]
    assert isinstance(tuned, TunedScript) and isinstance(verdict, VerifiedChange)
    assert from_toml((tmp_path / "plan.toml").read_bytes()) == tuned.plan
    assert verdict.verdict.equality.holds
    assert sorted(os.listdir(tmp_path)) == ["plan.toml", "report.html", "report.json", "train.py"]


def test_the_page_has_the_options_that_there_are() -> None:
    from flatout.app.cell_magic import _OPTIONS

    table = PAGE.read_text().partition("| option |")[2].partition("\n\n")[0]
    assert set(re.findall(r"--\w+", table)) == set(_OPTIONS)
