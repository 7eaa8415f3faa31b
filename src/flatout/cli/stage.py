"""One side of a proof: `python -m flatout.cli.stage REQUEST ORDERS ANSWERS`; or `--serve SOCKET`, which forks them."""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import sys
from pathlib import Path
from typing import Final, NoReturn

_PR_SET_PDEATHSIG: Final = 1
_BY_NVML: Final = "PYTORCH_NVML_BASED_CUDA_CHECK"
"""Has torch.cuda.is_available ask the driver's library for monitoring (torch's notes on CUDA)."""


def stage(path: str, orders: int, answers: int) -> int:
    """Run the requested script step by step, on order; its exit code. The process is to end right after that."""
    from flatout.errors import FlatoutError
    from flatout.profiling.running.script import load_module, load_script, print_to_stderr
    from flatout.records.record import from_json
    from flatout.session import run_stage
    from flatout.verification.process import Request

    _die_with_parent()
    request = from_json(Path(path).read_bytes(), Request)
    sys.path[0] = ""  # python -m put our start folder there; the script's own goes first later
    try:
        load = load_script if request.kind == "script" else load_module
        script = load(request.target, request.arguments)
        sys.path.pop(0)
        code = run_stage(request, script, orders=orders, answers=answers)
    except FlatoutError as e:
        print_to_stderr(f"flatout: {e}")
        code = 2
    sys.stdout.flush()
    sys.stderr.flush()
    atexit._run_exitfuncs()
    return code


def server(descriptor: int) -> NoReturn:
    """Import what a stage needs, and fork stages on order."""
    from flatout.session import import_stage
    from flatout.verification.forking import serve

    _die_with_parent()
    before = os.environ.get(_BY_NVML)
    os.environ[_BY_NVML] = "1"  # a process whose parent has asked CUDA itself cannot use it
    import_stage()
    del os.environ[_BY_NVML]
    if before is not None:
        os.environ[_BY_NVML] = before
    serve(descriptor, stage)


def _die_with_parent() -> None:
    """On Linux: be killed when the process that orders our steps is (prctl(2), PR_SET_PDEATHSIG)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))


if __name__ == "__main__":
    if sys.argv[1] == "--serve":
        server(int(sys.argv[2]))
    # nothing is left to be tidied up; taking a process with torch down takes most of a second
    os._exit(stage(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
