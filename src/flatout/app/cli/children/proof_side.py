"""One side of a proof.

`python -m flatout.app.cli.children.proof_side REQUEST ORDERS ANSWERS`; or `--serve SOCKET`, which forks them.
"""

from __future__ import annotations

import atexit
import os
import sys
from pathlib import Path
from typing import NoReturn

from flatout.core.runtime.fork_server import CHECK_CUDA_BY_NVML, die_with_parent


def side(path: str, orders: int, answers: int) -> int:
    """Run the requested script step by step, on order; its exit code. The process is to end right after that."""
    from flatout.app.cli.children import load_target
    from flatout.app.session import run_side
    from flatout.core.errors import FlatoutError
    from flatout.core.records.record import from_json
    from flatout.core.runtime.script import print_to_stderr
    from flatout.tune.verify.side_process import Request

    die_with_parent()
    request = from_json(Path(path).read_bytes(), Request)
    try:
        script = load_target(request.kind, request.target, request.arguments)
        code = run_side(request, script, orders=orders, answers=answers)
    except FlatoutError as e:
        print_to_stderr(f"flatout: {e}")
        code = 2
    sys.stdout.flush()
    sys.stderr.flush()
    atexit._run_exitfuncs()
    return code


def server(descriptor: int) -> NoReturn:
    """Import what a side needs, and fork sides on order."""
    from flatout.app.session import import_for_side
    from flatout.tune.verify.fork_server import serve

    die_with_parent()
    before = os.environ.get(CHECK_CUDA_BY_NVML)
    os.environ[CHECK_CUDA_BY_NVML] = "1"  # a process whose parent has asked CUDA itself cannot use it
    import_for_side()
    del os.environ[CHECK_CUDA_BY_NVML]
    if before is not None:
        os.environ[CHECK_CUDA_BY_NVML] = before
    serve(descriptor, side)


if __name__ == "__main__":
    if sys.argv[1] == "--serve":
        server(int(sys.argv[2]))
    # nothing is left to be tidied up; taking a process with torch down takes most of a second
    os._exit(side(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
