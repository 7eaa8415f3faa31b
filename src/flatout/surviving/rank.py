"""A forked process that becomes one rank of a job, or the store that its ranks meet at."""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import signal
import socket
import sys
import threading
import traceback
from contextlib import suppress
from time import monotonic
from typing import Final, NoReturn

import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from flatout.errors import FlatoutError
from flatout.profiling.running.script import load_module, load_script, print_to_stderr, run_script
from flatout.surviving.seat import Seat, take

_PR_SET_PDEATHSIG: Final = 1
_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)


def set_apart(parent: int) -> None:
    """In the fork, first: a process group and an input of its own, the usual signals, and death when `parent` dies (prctl(2))."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.setpgid(0, 0)
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != parent:  # it died before we asked
        os._exit(1)


def become_rank(
    target: str, arguments: tuple[str, ...], is_module: bool, seat: Seat, environment: dict[str, str], report: int
) -> NoReturn:
    """Run the script as its own process would, and end. What it raises is told on the descriptor `report`."""
    code, said = 1, ""
    try:
        os.environ.update(environment)
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            numpy.random.seed()  # as in a process of its own; forks would all draw the same
        take(seat)
        register_optimizer_step_post_hook(lambda *_: seat.advance())
        script = (load_module if is_module else load_script)(target, arguments)
        outcome = run_script(script)
        code, said = outcome.exit_code, outcome.exit
        if not code:
            threading._shutdown()  # type: ignore[attr-defined]  # waits for the script's threads, as the interpreter's end does
            atexit._run_exitfuncs()
    except FlatoutError as e:
        code, said = 2, f"{type(e).__name__}: {e}"
        print_to_stderr(f"flatout: {e}")
    except BaseException:  # noqa: BLE001  # nothing may go on as another zygote
        said = traceback.format_exc()
        traceback.print_exc()
    finally:
        if code:
            os.write(report, json.dumps([said, monotonic()]).encode())
        with suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def become_store(host: str, report: int) -> NoReturn:
    """Hold the store of one epoch, on a free port that is told on the descriptor `report`, until killed."""
    try:
        everywhere = host not in ("127.0.0.1", "localhost")
        listener = socket.create_server(("0.0.0.0" if everywhere else "127.0.0.1", 0), backlog=4096)
        port = listener.getsockname()[1]
        store = dist.TCPStore(  # type: ignore[attr-defined]
            "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        os.write(report, json.dumps(store.port).encode())
        while True:
            signal.pause()
    except BaseException:  # noqa: BLE001  # nothing may go on as another zygote
        traceback.print_exc()
    finally:
        os._exit(1)


def warm_up() -> None:
    """Import what the first step of a training imports, so that forks have it; starts no threads and touches no device."""
    # the first step of an optimizer imports torch._dynamo; the step itself would ask CUDA, which no fork could use then
    import torch._dynamo
    import torch.distributed.fsdp
    import torch.distributed.tensor  # noqa: F401

    import flatout.data.batches
    import flatout.data.feed
    import flatout.parallel.world
    import flatout.surviving.survivor  # noqa: F401
