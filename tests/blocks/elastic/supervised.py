"""Supervised jobs without a start of Python and an import of torch for each: fork servers are forks of one process."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

from tests.blocks.parallel.forked import lines_of

TRAIN = Path(__file__).with_name("train.py")

_HEAD = """
import json, signal, socket, time
from pathlib import Path
from flatout.core.records.record import to_json
from flatout.blocks.elastic import fork_server, node, rank
from flatout.blocks.elastic.messages import Job, NodeLink
from flatout.blocks.elastic.supervisor import Supervisor

rank.warm_up()
MEMORY = sys.argv[1]

class Forked:
    # A fork server as `subprocess.Popen` has it.
    def __init__(self, connection, work):
        theirs, ours = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            os.close(ours)
            os.dup2(theirs, 0)
            fork_server.ForkServer(NodeLink(socket.socket(fileno=os.dup(connection.fileno()))), work).serve()
            os._exit(0)
        os.close(theirs)
        os.set_inheritable(ours, False)
        self.stdin = os.fdopen(ours, "wb")

    code = None

    def wait(self, timeout=None):
        if self.code is None:
            self.code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.code

    def kill(self):
        if self.code is None:
            os.kill(self.pid, signal.SIGKILL)

def attach(self, connection):
    self.kill()
    self._process = Forked(connection, self.work)

node.Node.attach = attach

def supervised(target, *arguments, **options):
    job = Job(target=str(target), arguments=tuple(map(str, arguments)), memory=MEMORY, **options)
    return Supervisor(job, environment={}).run()
"""


def messages_of(script: str, memory: Path, *arguments: str | Path) -> list[Any]:
    """What a script reports, which has `supervised(target, *arguments, **options)`; a JSON each."""
    memory.mkdir(exist_ok=True)
    return [json.loads(line) for line in lines_of(_HEAD + textwrap.dedent(script), memory, *arguments)]
