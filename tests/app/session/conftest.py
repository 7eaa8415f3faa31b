from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tests.command_line import QUICK


class Ran(NamedTuple):
    """What one `flatout check` printed, its exit code, and its JSON (None when none was written)."""

    code: int
    out: str
    err: str
    report: dict[str, Any] | None

    @property
    def rules(self) -> list[str]:
        assert self.report is not None
        return [f["rule"] for f in self.report["findings"]]


Check = Callable[..., Ran]


@pytest.fixture
def check(tmp_path: Path, cache_home: Path) -> Check:
    """Writes a script, runs `flatout check` on it in `tmp_path`, and returns what came out; `before` is done before."""

    def run(
        script: str | None, *options: str, name: str = "train.py", arguments: tuple[str, ...] = (), before: str = ""
    ) -> Ran:
        if script is not None:
            (tmp_path / name).write_text(textwrap.dedent(script))
        out = tmp_path / "report.json"
        target = () if "-m" in options else (name,)
        command = [
            sys.executable,
            "-c",
            f"{before}; from flatout.app.cli import main; main()".removeprefix("; "),
            "check",
            "--json",
            str(out),
            *options,
        ]
        done = subprocess.run(
            [*command, *target, *arguments],
            cwd=tmp_path,
            env={**os.environ, **QUICK, "XDG_CACHE_HOME": str(cache_home), "COLUMNS": "100"},
            capture_output=True,
            text=True,
            timeout=110,
            check=False,
        )
        return Ran(done.returncode, done.stdout, done.stderr, json.loads(out.read_text()) if out.exists() else None)

    return run
