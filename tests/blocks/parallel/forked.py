"""Scripts of several ranks without a start of Python and an import of torch for each: ranks are forks of one process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

HEAD = """
    import faulthandler, gc, os, signal, sys, traceback
    import torch

    torch.set_num_threads(1)  # so that no threads are there to be forked
    import torch._dynamo  # which the first step of an optimizer imports, in each rank; the step itself would ask CUDA

    def store():
        # A process that holds the store through which ranks meet, and its port. A port that is only looked for and given back may
        # be somebody else's connection by the time that a rank binds it: the other ranks would then wait for half an hour.
        read, write = os.pipe()
        holder = os.fork()
        if not holder:
            tcp_store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            os.write(write, f"{tcp_store.port}".encode())
            signal.pause()
        os.close(write)
        port = os.read(read, 16).decode()
        os.close(read)
        return holder, port

    def as_ranks(num, work):
        # Call `work` in `num` processes with the environment of torchrun; an error of one is printed, ends the others,
        # and is raised.
        holder, port = store()
        gc.freeze()  # what is there before the ranks is no garbage of theirs: a collection would walk, and so copy, it in each
        ranks = {}
        for rank in range(num):
            process = os.fork()
            ranks[process] = rank
            if not process:
                faulthandler.dump_traceback_later(90, exit=True)  # a rank that waits for ever says where
                os.environ |= {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}", "WORLD_SIZE": f"{num}"}
                os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "forked"}
                os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
                try:
                    # What it returns, such as the names of a script, is not freed: a process group that goes while we hold the
                    # interpreter's lock waits for its threads, and one of them, now and then, for the lock.
                    returned = work()
                    code = 0
                except BaseException:
                    traceback.print_exc()
                    code = 1
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        codes = [0] * num
        left = set(ranks)
        while left:
            process, status = os.waitpid(-1, 0)
            if process not in left:
                continue
            left.remove(process)
            codes[ranks[process]] = os.waitstatus_to_exitcode(status)
            if codes[ranks[process]]:
                for other in left:
                    os.kill(other, signal.SIGKILL)
        os.kill(holder, signal.SIGKILL)
        os.waitpid(holder, 0)
        assert codes == [0] * num, codes

    def report(text):
        # In one write, so that lines of several ranks do not mix.
        os.write(1, f"{text}\\n".encode())
"""


def lines_of(script: str, *arguments: str | Path) -> list[str]:
    """The lines that a script reports which calls `as_ranks` and `report`; an error when it does not end well."""
    code = textwrap.dedent(HEAD) + textwrap.dedent(script)
    with subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            output, wrong = process.communicate(timeout=110)
        except BaseException:
            # The time of a test may be over, too, and leaving the block would wait for ranks that hang.
            os.killpg(process.pid, signal.SIGKILL)
            raise
    assert process.returncode == 0, wrong[-3000:]
    return output.splitlines()
