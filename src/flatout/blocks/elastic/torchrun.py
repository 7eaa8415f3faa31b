"""The launcher torchrun, whose ranks begin without importing torch: its rendezvous, stores, logs and exit codes, and forks of a
server of ours.

`python -m flatout.blocks.elastic.torchrun [torchrun's options] SCRIPT [arguments]`. Scripts and modules run in forks; what is no
Python (`--no-python`), and ranks that are bound to parts of the machine (`--numa-binding`), are started as torchrun starts them.
"""

from __future__ import annotations

import inspect
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch.distributed import run as torchrun
from torch.distributed.elastic.agent.server import local_elastic_agent
from torch.distributed.elastic.multiprocessing.api import SubprocessContext

from flatout.blocks.elastic.preloaded import PreloadedProcess, PreloadedServer


class RankScript(NamedTuple):
    """A script or module of Python, and its arguments."""

    target: str
    arguments: tuple[str, ...]
    is_module: bool


def python_script(entrypoint: object, arguments: Sequence[object]) -> RankScript | None:
    """What torchrun is to start, where it is Python of this interpreter; None otherwise.

    >>> python_script(sys.executable, ("-u", "-m", "mine.train", "--epochs", 3))
    RankScript(target='mine.train', arguments=('--epochs', '3'), is_module=True)
    >>> python_script("/bin/echo", ("train.py",)) is None
    True
    """
    words = [str(one) for one in arguments]
    if entrypoint != sys.executable or words[:1] != ["-u"]:
        return None
    is_module = words[1:2] == ["-m"]
    rest = words[2:] if is_module else words[1:]
    return RankScript(rest[0], tuple(rest[1:]), is_module) if rest else None


class _ForkedRank:
    """What torch's context keeps of a rank: `proc`, and `close` with a signal."""

    def __init__(self, proc: PreloadedProcess, local_rank: int) -> None:
        self.proc, self.local_rank_id = proc, local_rank

    def close(self, death_sig: signal.Signals | None = None) -> None:
        """Signal the rank and what it has started."""
        for send in (os.killpg, os.kill):
            try:
                send(self.proc.pid, death_sig or signal.SIGTERM)
                return
            except ProcessLookupError:
                continue


class ForkedContext(SubprocessContext):
    """What torch has for a node's processes, of forks."""

    def __init__(self, server: PreloadedServer, **options: Any) -> None:
        super().__init__(**options)
        self._server = server

    def _start(self) -> None:
        for local_rank in range(self.nprocs):
            script = python_script(self.entrypoint, self.args[local_rank])
            assert script is not None
            proc = self._server.fork(
                script.target,
                script.arguments,
                is_module=script.is_module,
                environment={**os.environ, **self.envs[local_rank]},
                stdout=self.stdouts[local_rank] or None,
                stderr=self.stderrs[local_rank] or None,
            )
            self.subprocess_handlers[local_rank] = _ForkedRank(proc, local_rank)  # type: ignore[assignment]


def main(arguments: Sequence[str] | None = None) -> None:
    """What torchrun does with these arguments. Its function that starts processes is another one meanwhile."""
    agent: Any = local_elastic_agent
    before = agent.start_processes
    names = set(inspect.signature(SubprocessContext).parameters)

    def start_processes(**options: Any) -> Any:
        scripts = [python_script(options["entrypoint"], one) for one in options["args"].values()]
        if None in scripts or options.get("numa_options") is not None:
            return before(**options)
        context = ForkedContext(server, **{name: value for name, value in options.items() if name in names})
        try:
            context.start()
        except Exception:
            context.close()
            raise
        return context

    with PreloadedServer(os.environ) as server:
        agent.start_processes = start_processes
        try:
            torchrun.main(list(arguments) if arguments is not None else None)
        finally:
            agent.start_processes = before


if __name__ == "__main__":
    main()
