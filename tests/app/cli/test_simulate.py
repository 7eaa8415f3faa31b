from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flatout.app.cli.app import app
from flatout.core.errors import UsageError
from flatout.core.records.failure import Goodput
from flatout.report.parts.goodput import recovery_table
from flatout.report.text import plain_lines


def test_failures_are_counted_and_measures_weighed(tmp_path: Path) -> None:
    page = tmp_path / "goodput.html"
    result = CliRunner().invoke(app, ["simulate", "--gpus", "16384", "--rate", "3.8", "--html", str(page)])
    assert result.exit_code == 0, result.output
    assert "420 +- 41 in 54 days" in result.output
    kept = [float(re.findall(r"([\d.]+)%", line)[0]) for line in result.output.splitlines()[2:6]]
    assert kept[0] < kept[1] < kept[3]
    assert kept[0] < kept[2] < kept[3]
    text = page.read_text()
    assert text.count("<svg") == 1
    assert "saved in the background" in text


def test_hours_between_interruptions_instead_of_a_rate() -> None:
    result = CliRunner().invoke(app, ["simulate", "--gpus", "16384", "--mtbf", "1.8"])
    assert "one every 108 min" in result.output
    with pytest.raises(UsageError, match="give positive numbers"):
        CliRunner().invoke(app, ["simulate", "--gpus", "0"], catch_exceptions=False)


def test_a_bar_is_filled_by_its_parts() -> None:
    one = Goodput(goodput=0.5, saving=0.125, lost=0.125, down=0.25, interval_s=60.0, mtbf_s=600.0)
    (_, line) = plain_lines([recovery_table({"as it is": one})])
    assert "#" * 20 + "s" * 5 + "x" * 5 + "." * 10 in line
