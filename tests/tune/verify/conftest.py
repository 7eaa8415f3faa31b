"""Servers that fork the stages of all tests here: to start one takes as long as many a whole test."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from typing import IO

import pytest

from flatout.tune.verify.fork_server import ChildProcess, ForkServers
from flatout.tune.verify.side_process import Request, SideProcess


class LastingServers(ForkServers):
    """Servers that outlive those who use them, each stage forked anew. One thread: more would wait for other tests'."""

    def __init__(self) -> None:
        super().__init__()
        self._usual = {**os.environ, "OMP_NUM_THREADS": "1"}

    def start(
        self, request: str, descriptors: tuple[int, int], output: IO[bytes], environment: Mapping[str, str]
    ) -> ChildProcess:
        """See ForkServers. Only what a request asks for counts: pytest itself sets a variable anew for each test."""
        asked = {name: value for name, value in environment.items() if os.environ.get(name) != value}
        return super().start(request, descriptors, output, self._usual | asked)

    def end(self) -> None:
        """Others go on using them."""

    def end_all(self) -> None:
        super().end()


@pytest.fixture(scope="package")
def lasting_servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LastingServers | None]:
    """Servers of which the usual one stands ready; None where stages are not forked."""
    if sys.platform != "linux":
        yield None
        return
    servers = LastingServers()
    script = tmp_path_factory.mktemp("ready") / "ready.py"
    script.write_text("")
    with SideProcess(Request(target=os.fspath(script), is_whole=True), servers) as process:
        process.answer(timeout_s=60.0)
    yield servers
    servers.end_all()


@pytest.fixture
def forked(lasting_servers: LastingServers | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Proofs use the lasting servers."""
    monkeypatch.setattr("flatout.tune.verify.base_runs.fork_servers", lambda: lasting_servers)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stage that does not end by itself is signalled soon."""
    monkeypatch.setattr("flatout.tune.verify.side_process._PATIENCE_S", 0.5)
