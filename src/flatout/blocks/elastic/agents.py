"""The agent of a node that is started again when it is killed or has lost its rendezvous, and that does not wait for the
heartbeats of agents that died here.

Torch's rendezvous counts an agent until it has not heard of it for some seconds. One that was killed on this machine is known to
be gone at once: each leaves a small file with its process, which is removed when it ends in order.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

from torch.distributed import DistNetworkError, DistStoreError
from torch.distributed.elastic.rendezvous import dynamic_rendezvous
from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError, RendezvousStateError

from flatout.core.runtime.fork_server import die_with_parent

LOST: Final = (RendezvousConnectionError, RendezvousStateError, DistStoreError, DistNetworkError, ConnectionError)
"""Raised by an agent when the store of its rendezvous, or another agent in the middle of one, is gone."""
_LOST_CODE: Final = 76
"""Exit code of an agent that has lost its rendezvous: sysexits.h, EX_PROTOCOL."""
_FORWARDED: Final = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
_SHARED: Final = Path("/dev/shm")
_PREFIX: Final = "flatout-agent-"
_LEFT_S: Final = 3600.0
_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")
_LONG_AGO: Final = datetime(1970, 1, 1, tzinfo=UTC)

Run = Callable[[socket.socket], None]


def watch_agent(run: Run, serve: Run, *, restarts: int, on_restart: Callable[[str], None]) -> int:
    """Fork an agent, which calls `run`, and a server, which calls `serve`, with the ends of one connection; again, up to so many
    times, when the agent was killed or has lost its rendezvous. The last agent's exit code, or 128 and its signal.

    Signals to this process go on to the agent. Both children die with this process; the server has to end with its connection.
    """
    watched = {*_FORWARDED, signal.SIGCHLD}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, watched)
    handled = signal.signal(signal.SIGCHLD, lambda *_: None)  # blocked: so that the system does not discard it
    is_stopping = False
    try:
        while True:
            agent, server = _forked_pair(run, serve, before)
            while (code := _ended(agent)) is None:
                got = signal.sigwaitinfo(watched)
                if got.si_signo != signal.SIGCHLD:
                    is_stopping = is_stopping or got.si_signo not in (signal.SIGUSR1, signal.SIGUSR2)
                    if got.si_code <= 0:  # from a process; a terminal's goes to the agent as well
                        os.kill(agent, got.si_signo)
            os.waitpid(server, 0)
            if is_stopping or not restarts or not (code < 0 or code == _LOST_CODE):
                return code if code >= 0 else 128 - code
            restarts -= 1
            why = f"was killed by signal {-code}" if code < 0 else "has lost its rendezvous"
            on_restart(f"the agent {why}; another one starts")
    finally:
        for number in _FORWARDED if is_stopping else ():  # what came twice would end this process instead
            signal.signal(number, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, handled)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _forked_pair(run: Run, serve: Run, mask: set[int]) -> tuple[int, int]:
    """Process ids of an agent and of its server."""
    agent_end, server_end = socket.socketpair()
    with agent_end, server_end:
        server = _forked(serve, server_end, agent_end, mask)
        agent = _forked(run, agent_end, server_end, mask)
    return agent, server


def _forked(run: Run, mine: socket.socket, other: socket.socket, mask: set[int]) -> int:
    parent = os.getpid()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        die_with_parent()
        other.close()
        if os.getppid() == parent:
            run(mine)
            code = 0
    except LOST:
        traceback.print_exc()
        code = _LOST_CODE
    except SystemExit as e:
        code = e.code if isinstance(e.code, int) else 0 if e.code is None else 1
    except BaseException:  # noqa: BLE001  # nothing may go on as another launcher
        traceback.print_exc()
    finally:
        with suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _ended(pid: int) -> int | None:
    """A child's exit code, or minus its signal; None while it lives."""
    found, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if found else None


# -- agents that died here ---------------------------------------------------------------------------------------------------


@contextmanager
def known_agent(run_id: str, address: str | None) -> Iterator[None]:
    """Be known as an agent of that run on this machine, and have the rendezvous forget those of it that were killed here.

    `address` is what torchrun's --local-addr says, by which agents know one another; else it is the machine's name.
    """
    folder = _SHARED if os.access(_SHARED, os.W_OK) else Path(tempfile.gettempdir())
    prefix = f"{_PREFIX}{sha256(f'{os.getuid()} {run_id}'.encode()).hexdigest()[:24]}-"
    dead = _dead_agents(folder, prefix)
    _dead_agents(folder, _PREFIX, after_s=_LEFT_S)  # of jobs that were never started again
    mine = folder / f"{prefix}{os.getpid()}"
    with suppress(OSError):
        mine.write_text(json.dumps(_identity(os.getpid())))
    with _without(dead, address or socket.getfqdn(), folder / prefix):
        yield
    mine.unlink(missing_ok=True)  # not after an error or a signal: it may be started again


def _dead_agents(folder: Path, prefix: str, *, after_s: float = 0.0) -> set[int]:
    """Processes of agents that ended here without removing their files, which are removed now if they are so many seconds old."""
    dead = set()
    for path in folder.glob(f"{prefix}*"):
        with suppress(OSError, ValueError, LookupError, TypeError):
            there = path.lstat()
            if there.st_uid != os.getuid() or time.time() - there.st_mtime < after_s:  # noqa: TID251  # the wall clock's, as files
                continue
            found = json.loads(path.read_text())
            if found[1:3] == _identity(os.getpid())[1:3] and found != _identity(found[0]):
                dead.add(int(found[0]))
                if json.loads(path.read_text()) == found:  # no other agent with that process's number has begun
                    path.unlink()
    return dead - {os.getpid()}


def _identity(pid: int) -> list[Any]:
    """The process, the start of its machine, what process ids count in, and when it began; None for that where it is gone."""
    boot = _BOOT.read_text().strip() if _BOOT.exists() else ""
    try:
        state, *others = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        began = None if state in "ZX" else others[18]
    except OSError:
        began = None
    return [pid, boot, os.readlink("/proc/self/ns/pid"), began]


def _is_agent(pid: int, files: Path) -> bool:
    """Whether an agent with that process's number lives: numbers of dead ones are given again."""
    try:
        return bool(json.loads(Path(f"{files}{pid}").read_text()) == _identity(pid))
    except (OSError, ValueError):
        return False


@contextmanager
def _without(dead: set[int], address: str, files: Path) -> Iterator[None]:
    """Have torch's rendezvous take the last heartbeats of these agents as long ago, so that it removes them; and not be closed
    by an agent that has lost it."""
    holder: Any = dynamic_rendezvous._BackendRendezvousStateHolder
    handler: Any = dynamic_rendezvous.DynamicRendezvousHandler
    before, shutdown_before = holder._sanitize, handler.shutdown

    def sanitize(self: Any) -> None:
        last = self._state.last_heartbeats
        gone = [n for n in last if n.addr == address and n.pid in dead and not _is_agent(n.pid, files)]
        last.update(dict.fromkeys(gone, _LONG_AGO))
        before(self)

    def shutdown(self: Any) -> bool:
        # an agent that has lost the rendezvous would close it for all others when it finds it again, and for itself
        return False if isinstance(sys.exc_info()[1], LOST) else bool(shutdown_before(self))

    holder._sanitize, handler.shutdown = sanitize, shutdown
    try:
        yield
    finally:
        holder._sanitize, handler.shutdown = before, shutdown_before
