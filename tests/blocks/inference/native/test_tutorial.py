"""The tutorial on native engines: its files are written, its commands run, and what it says of their output is so."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[4] / "docs" / "tutorials" / "native-engine.md"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (shutil.which("cc") and shutil.which("c++")), reason="no C and C++ compiler"),
]


def blocks(kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def typed(command: str, folder: Path) -> str:
    """A block of the page, in a shell whose `python` and `flatout` are this environment's."""
    shell = f'set -e\npython() {{ "{sys.executable}" "$@"; }}\nflatout() {{ "{sys.executable}" -m flatout "$@"; }}\n'
    done = subprocess.run(
        ["sh", "-c", shell + command],
        cwd=folder,
        env={**os.environ, "COLUMNS": "120", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def outputs(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"^y (\S+)$", text, flags=re.MULTILINE)]


def test_the_page_leads_from_training_to_a_program(tmp_path: Path) -> None:
    training, building, comparing, compiling, renewing = blocks("bash")
    model, compare, renew = blocks("python")
    (tmp_path / "forecaster.py").write_text(model)
    (tmp_path / "compare.py").write_text(compare)
    (tmp_path / "renew.py").write_text(renew)

    losses = [float(loss) for loss in re.findall(r"loss (\S+)", typed(training, tmp_path))]
    report = typed(building, tmp_path)
    compared = typed(comparing, tmp_path)
    program = typed(compiling, tmp_path)
    before = (tmp_path / "engine" / "weights.bin").read_bytes()
    typed(renewing, tmp_path)

    assert losses == sorted(losses, reverse=True) and losses[-1] < 0.05
    assert "from Python" in report and "in C" in report and "largest error against float64" in report
    worst = re.search(r"500 events: (\S+)", compared)
    assert worst is not None and float(worst[1]) < 1e-5
    assert len(outputs(compared)) == 3
    assert outputs(program) == pytest.approx(outputs(compared), rel=1e-6)
    assert (tmp_path / "engine" / "weights.bin").read_bytes() == before
