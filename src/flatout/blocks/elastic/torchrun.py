"""The launcher torchrun, whose ranks begin without importing torch: its rendezvous, stores, logs and exit codes, and forks of a
server of ours.

`python -m flatout.blocks.elastic.torchrun [torchrun's options] SCRIPT [arguments]`. Scripts and modules run in forks; what is no
Python (`--no-python`), and ranks that are bound to parts of the machine (`--numa-binding`), are started as torchrun starts them.
"""

from __future__ import annotations

import inspect
import os
import signal
import socket
import sys
from argparse import Namespace
from collections.abc import Sequence
from contextlib import suppress
from time import monotonic, sleep
from types import FrameType
from typing import Any, Final, NamedTuple

from torch.distributed import run as torchrun
from torch.distributed.elastic.agent.server import local_elastic_agent
from torch.distributed.elastic.multiprocessing.api import (
    RunProcsResult,
    SignalException,
    SubprocessContext,
    _terminate_process_handler,
)
from torch.distributed.elastic.multiprocessing.errors import record

from flatout.blocks.elastic.agents import known_agent, watch_agent
from flatout.blocks.elastic.preemption import AGENT, EXIT_CODE, catches
from flatout.blocks.elastic.preloaded import PreloadedProcess, PreloadedServer, import_for_ranks, serve_forks
from flatout.core.runtime.script import print_to_stderr

_GRACE_S: Final = 30.0
_POLL_S: Final = 0.05


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
        """Signal the rank and what it has started.

        A rank that handles SIGUSR1 keeps its state: where the agent was asked to end, it gets that signal, and saves; where its
        peers have failed, it is killed, since a notice to end would have it wait for them."""
        number = death_sig or signal.SIGTERM
        if number == signal.SIGTERM and catches(self.proc.pid, signal.SIGUSR1):
            if was_asked_to_end():
                with suppress(ProcessLookupError):
                    os.kill(self.proc.pid, signal.SIGUSR1)
                return
            number = signal.SIGKILL
        for send in (os.killpg, os.kill):
            try:
                send(self.proc.pid, number)
                return
            except ProcessLookupError:
                continue


def was_asked_to_end() -> bool:
    """Whether the agent is handling a signal that asked it to end."""
    return isinstance(sys.exc_info()[1], SignalException)


class ForkedContext(SubprocessContext):
    """What torch has for a node's processes, of forks.

    Ranks that have saved their state and left (exit code 75) have not failed: the agent waits for the others, and leaves as well.
    """

    def start(self) -> None:
        """Start the processes, and handle signals to end as torch does, SIGTERM once."""
        super().start()
        if signal.getsignal(signal.SIGTERM) is _terminate_process_handler:
            signal.signal(signal.SIGTERM, _raise_once)

    def _poll(self) -> RunProcsResult | None:
        if EXIT_CODE in self._codes():
            deadline_s = monotonic() + (_grace_s() or _GRACE_S)
            while (
                any(one.proc.poll() is None for one in self.subprocess_handlers.values()) and monotonic() < deadline_s
            ):
                sleep(_POLL_S)
            if self._have_left():
                raise SystemExit(EXIT_CODE)
        return super()._poll()

    def _codes(self) -> set[int | None]:
        return {one.proc.poll() for one in self.subprocess_handlers.values()}

    def _have_left(self) -> bool:
        """Whether ranks have left, and none has failed at that."""
        return EXIT_CODE in self._codes() and self._codes() <= {EXIT_CODE, 0}

    def _close(self, death_sig: signal.Signals, timeout: int = 30) -> None:
        if not was_asked_to_end():
            super()._close(death_sig, timeout)
            return
        super()._close(death_sig, max(timeout, int(_grace_s() or _GRACE_S)))
        if self._have_left():
            raise SystemExit(EXIT_CODE)

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
                environment={**os.environ, **self.envs[local_rank], AGENT: "1"},
                stdout=self.stdouts[local_rank] or None,
                stderr=self.stderrs[local_rank] or None,
            )
            self.subprocess_handlers[local_rank] = _ForkedRank(proc, local_rank)  # type: ignore[assignment]


def _raise_once(number: int, frame: FrameType | None) -> None:
    """Handle a signal to end as torch does, and SIGTERM once only.

    A scheduler sends it to launcher and agent, and the launcher on to the agent.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    name = signal.Signals(number)
    raise SignalException(f"Process {os.getpid()} got signal: {name}", sigval=name)


def _grace_s() -> float | None:
    """Seconds that ranks have to save their state when they are asked to end; None where what FLATOUT_GRACE_S says is none."""
    text = os.environ.get("FLATOUT_GRACE_S", f"{_GRACE_S}")
    return float(text) if text.replace(".", "", 1).isdecimal() else None


def main(arguments: Sequence[str] | None = None) -> None:
    """What torchrun does with these arguments; `--agent-restarts` is an option of ours."""
    parser = torchrun.get_args_parser()
    parser.add_argument(
        "--agent-restarts",
        type=int,
        default=os.environ.get("PET_AGENT_RESTARTS", "0"),
        help="How often this node's agent starts again after it was killed, or has lost its rendezvous.",
    )
    options = parser.parse_args(arguments)
    if _grace_s() is None:
        parser.error(f"FLATOUT_GRACE_S is '{os.environ['FLATOUT_GRACE_S']}'; give seconds, such as 110")
    # each start of the ranks has a store of its own: in a shared one they find what the start before has left
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    if options.agent_restarts < 1:
        run_agent(options)
        return
    import_for_ranks()
    code = watch_agent(
        lambda connection: run_agent(options, connection),
        serve_forks,
        restarts=options.agent_restarts,
        on_restart=lambda text: print_to_stderr(f"flatout-torchrun: {text}"),
    )
    raise SystemExit(code)


@record
def run_agent(options: Namespace, connection: socket.socket | None = None) -> None:
    """Be the agent, as torchrun with these options. Its function that starts processes is another one meanwhile.

    The server that forks is at the other end of the connection; without one, or where it is killed, one is started.
    """
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

    with PreloadedServer(os.environ, connection) as server, known_agent(options.rdzv_id, options.local_addr):
        agent.start_processes = start_processes
        try:
            torchrun.run(options)
        finally:
            agent.start_processes = before


if __name__ == "__main__":
    main()
