"""The tutorial on native engines: its files are written, its commands run, and what it shows of their output is so."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (shutil.which("cc") and shutil.which("c++")), reason="no C and C++ compiler"),
]


@pytest.mark.timeout(300)
@pytest.mark.long
def test_the_page_leads_from_training_to_a_program() -> None:
    command = [sys.executable, ROOT / "docs" / "run_pages.py", ROOT / "docs" / "tutorials" / "native-engine.md"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
