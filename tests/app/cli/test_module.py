"""`python -m flatout` is the command, for environments whose scripts are not on the path."""

from __future__ import annotations

import subprocess
import sys

import pytest

from flatout import __version__


@pytest.mark.slow
def test_running_the_package_runs_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "flatout", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith(f"flatout {__version__}, torch ")
