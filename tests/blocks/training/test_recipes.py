"""Recipes that are documented, and no part of the package, do what their pages say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

RECIPES = Path(__file__).parents[3] / "examples" / "recipes"
AS_SCRIPT = """
import runpy, sys
import torch._dynamo  # which the first step of an optimizer imports: once, and not in each process
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.multi
@pytest.mark.long
def test_processes_that_share_weights_train_them() -> None:
    said = subprocess.run(
        [sys.executable, "-c", AS_SCRIPT, str(RECIPES / "hogwild.py"), "--steps", "1500"],
        capture_output=True,
        text=True,
        check=True,
        timeout=110,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    ).stdout
    accuracy = re.search(r"2 processes: \d+ steps/s, accuracy (0\.\d+)", said)
    assert accuracy is not None and float(accuracy.group(1)) > 0.8
