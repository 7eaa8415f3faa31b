"""What a plan costs at the start of a run."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from time import monotonic
from typing import Final

from flatout.core.files import write_whole_file
from flatout.core.records.plan import Plan, to_toml
from flatout.tune.verify.side_process import Request

_NUM_STARTS: Final = 2
_QUICK_S: Final = 3.0
"""Slower starts are measured once."""
_BARE: Final = "import torch; torch.cuda.is_available() and torch.cuda.get_device_name()"
"""What the script itself does at its start, and a plan's check of the device as well."""


def run_start_s(plan: Plan, script: Request, *, timeout_s: float) -> float | None:
    """Seconds that `flatout run` takes until the script's first line, more than python with torch and the device.

    The best of two of both.

    None where it could not be begun, or took longer than `timeout_s`.
    """
    with tempfile.TemporaryDirectory(prefix="flatout-start-") as folder:
        path = Path(folder) / "plan.toml"
        write_whole_file(path, to_toml(plan))
        run = [sys.executable, "-m", "flatout.app.cli.children.planned_run", "--print", str(path)]
        run += [script.kind, script.target, *script.arguments]
        try:
            bare: list[float] = []
            planned: list[float] = []
            while len(bare) < _NUM_STARTS and sum(bare) < _QUICK_S:
                bare.append(_seconds([sys.executable, "-c", _BARE], timeout_s))
                planned.append(_seconds(run, timeout_s))
        except (subprocess.SubprocessError, OSError):
            return None
    return max(0.0, min(planned) - min(bare))


def _seconds(command: Sequence[str], timeout_s: float) -> float:
    """What a process takes. Raises subprocess.SubprocessError where it fails or takes longer than `timeout_s`."""
    began = monotonic()
    subprocess.run(command, check=True, timeout=timeout_s, stdin=subprocess.DEVNULL, capture_output=True)
    return monotonic() - began
