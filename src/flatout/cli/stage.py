"""One side of a proof: `python -m flatout.cli.stage REQUEST ORDERS ANSWERS`. Not a command of its own."""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import sys
from pathlib import Path
from typing import Final

_PR_SET_PDEATHSIG: Final = 1


def main() -> int:
    """Run the requested script step by step, on order; its exit code."""
    from flatout.errors import FlatoutError
    from flatout.profiling.running.script import load_module, load_script, print_to_stderr
    from flatout.records.record import from_json
    from flatout.session import run_stage
    from flatout.verification.process import Request

    _die_with_parent()
    request = from_json(Path(sys.argv[1]).read_bytes(), Request)
    sys.path[0] = ""  # python -m put our start folder there; the script's own goes first later
    try:
        load = load_script if request.kind == "script" else load_module
        script = load(request.target, request.arguments)
    except FlatoutError as e:
        print_to_stderr(f"flatout: {e}")
        return 2
    sys.path.pop(0)
    return run_stage(request, script, orders=int(sys.argv[2]), answers=int(sys.argv[3]))


def _die_with_parent() -> None:
    """On Linux: be killed when the process that orders our steps is (prctl(2), PR_SET_PDEATHSIG)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    atexit._run_exitfuncs()
    os._exit(code)  # nothing is left to be tidied up; taking a process with torch down takes most of a second
