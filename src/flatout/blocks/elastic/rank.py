"""A forked process that becomes one rank of a job, or the store at which its ranks rendezvous."""

from __future__ import annotations

import atexit
import json
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Mapping
from contextlib import suppress
from time import monotonic
from typing import NoReturn

import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from flatout.blocks.elastic.messages import NodeWork, RankContext, set_rank_context
from flatout.core.errors import FlatoutError
from flatout.core.runtime.script import load_module, load_script, print_to_stderr, run_script


def become_rank(work: NodeWork, context: RankContext, environment: Mapping[str, str], report: int) -> int:
    """Run the script as a process of its own would; its exit code. What it raises is written to the descriptor `report`."""
    code, message = 1, ""
    try:
        os.environ.update(environment)
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            numpy.random.seed()  # as in a process of its own; forks would all draw the same
        set_rank_context(context)
        register_optimizer_step_post_hook(lambda *_: context.advance())
        job = work.job
        script = (load_module if job.is_module else load_script)(job.target, job.arguments)
        outcome = run_script(script)
        code, message = outcome.exit_code, outcome.exit
        if not code:
            threading._shutdown()  # type: ignore[attr-defined]  # waits for the script's threads, as the interpreter's end does
            atexit._run_exitfuncs()
    except FlatoutError as e:
        code, message = 2, f"{type(e).__name__}: {e}"
        print_to_stderr(f"flatout: {e}")
    except BaseException:  # noqa: BLE001  # the supervisor is to know, whatever it was
        message = traceback.format_exc()
        traceback.print_exc()
    if code:
        os.write(report, json.dumps([message, monotonic()]).encode())
    with suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    return code


def become_store(report: int) -> NoReturn:
    """Serve the store of one restart until killed, on a free port of this machine's own address, which no other machine reaches.

    The port is written to the descriptor `report`.
    """
    listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
    port = listener.getsockname()[1]
    store = dist.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    os.write(report, json.dumps(store.port).encode())
    while True:
        signal.pause()


def warm_up() -> None:
    """Import what the first step of a training imports, so that forks have it. Starts no threads and touches no device."""
    # the first step of an optimizer imports torch._dynamo; the step itself would ask CUDA, which no fork could use then
    import torch._dynamo
    import torch.distributed.fsdp
    import torch.distributed.tensor  # noqa: F401
