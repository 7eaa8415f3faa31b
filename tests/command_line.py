"""The command `flatout` in this process, for what a process of its own would only make slow: errors, and pages of text."""

from __future__ import annotations

import os
import sys
from contextlib import chdir, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

from flatout.app.cli import main

QUICK = {"OMP_NUM_THREADS": "1", "TORCH_COMPILE_DISABLE": "1"}
"""What `flatout` is started with where compiling is not what a test looks at: a trial of it takes longer than a small script."""


class Ended(NamedTuple):
    """The exit code of a command, and what it printed."""

    code: int
    out: str
    err: str


def flatout(*arguments: object, folder: Path | None = None) -> Ended:
    """`flatout ARGUMENTS`, typed in `folder`."""
    out, err = StringIO(), StringIO()
    code: object = None
    with (
        chdir(folder or Path.cwd()),
        patch.dict(os.environ, {"COLUMNS": "100"}),
        patch.object(sys, "argv", ["flatout", *map(str, arguments)]),
        patch.object(sys.modules["__main__"], "__package__", ""),  # else it is called after pytest
        redirect_stdout(out),
        redirect_stderr(err),
    ):
        try:
            main()
        except SystemExit as e:
            code = e.code
    assert code is None or isinstance(code, int)
    return Ended(code or 0, out.getvalue(), err.getvalue())
