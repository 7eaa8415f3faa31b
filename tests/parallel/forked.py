"""Scripts of several ranks without a start of Python and an import of torch for each: ranks are forks of one process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

HEAD = """
    import os, socket, sys, traceback
    import torch

    torch.set_num_threads(1)  # so that no threads are there to be forked
    torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))]).step()  # imports what else each rank would import

    def as_ranks(num, work):
        # Call `work` in `num` processes with the environment that torchrun gives them; an error of one is told and raised.
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        ranks = []
        for rank in range(num):
            ranks.append(os.fork())
            if not ranks[-1]:
                os.environ |= {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}", "WORLD_SIZE": f"{num}"}
                os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}", "TORCHELASTIC_RUN_ID": "forked"}
                try:
                    work()
                    code = 0
                except BaseException:
                    traceback.print_exc()
                    code = 1
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        codes = [os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]) for rank in ranks]
        assert codes == [0] * num, codes

    def told(text):
        # In one write, so that lines of several ranks do not mix.
        os.write(1, f"{text}\\n".encode())
"""


def lines_of(script: str, *arguments: str | Path) -> list[str]:
    """What a script that calls `as_ranks` and `told` tells; an error when it does not end well."""
    code = textwrap.dedent(HEAD) + textwrap.dedent(script)
    with subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            said, wrong = process.communicate(timeout=110)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # the ranks too
            raise
    assert process.returncode == 0, wrong[-3000:]
    return said.splitlines()
