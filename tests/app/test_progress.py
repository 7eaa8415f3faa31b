"""The line that says how far an observation has come, on a terminal that a script writes to as well."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import pytest
from tests.terminal import Terminal

from flatout.app.progress import StatusLine, progress_text
from flatout.core.records.progress import Doing, Progress
from flatout.core.records.record import to_json

ROWS, COLUMNS = 12, 80

SCRIPT = """
import sys, time
import torch
from torch import nn
net = nn.Linear(8, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(60):
    net(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
    time.sleep(0.05)
    sys.stderr.write(f"\\rbar {step + 1:3}/60")
    sys.stderr.flush()
    if step % 10 == 9:
        sys.stderr.write("\\n")
        print(f"line {step + 1}", flush=True)
"""


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[int, TextIO]]:
    """(our end, the programs' end) of a pseudo-terminal."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    monkeypatch.setenv("TERM", "xterm")
    with os.fdopen(theirs, "w") as file:
        yield ours, file
    os.close(ours)


def written(ours: int) -> str:
    """What lies in the terminal's buffer."""
    os.set_blocking(ours, False)
    chunks = []
    while True:
        try:
            chunks.append(os.read(ours, 1 << 16))
        except BlockingIOError:
            return b"".join(chunks).decode()


@pytest.mark.parametrize(
    ("doing", "num_steps", "left_s", "shown"),
    [
        ("starting", 0, None, "flatout: starting"),
        ("warm-up", 1, 30.0, "flatout: warm-up, 1 step, about 30 s left"),
        ("timing again", 214, 20.4, "flatout: timing again, 214 steps, about 20 s left"),
        ("timing again", 999, 0.2, "flatout: timing again, 999 steps, nearly done"),
        ("timing", 7, 600.0, "flatout: timing, 7 steps, about 10 min left"),
        ("trials", 14, None, "flatout: trials, 14 steps"),
    ],
)
def test_the_words_of_the_line(doing: Doing, num_steps: int, left_s: float | None, shown: str) -> None:
    assert progress_text(Progress(doing=doing, num_steps=num_steps, left_s=left_s)) == shown


def test_the_script_writes_above_the_line_and_nothing_of_it_is_lost(
    terminal: tuple[int, TextIO], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flatout.app.progress._EVERY_S", 0.0)
    ours, theirs = terminal
    path = tmp_path / "progress.json"
    screen = Terminal(ROWS, COLUMNS)
    screen.feed("".join(f"before {i}\n" for i in range(20)))

    with StatusLine(path, theirs) as status:
        for step in range(30):
            path.write_bytes(to_json(Progress(doing="timing", num_steps=step, left_s=5.0)))
            theirs.write(f"\rbar {step}")
            theirs.flush()
            status.update()
            theirs.write(f"\rbar {step} done\nprinted {step}\n")
            theirs.flush()
            screen.feed(written(ours))
            assert screen.lines[-1].startswith("flatout: ")
            assert not any("flatout" in line for line in screen.lines[:-1])
    screen.feed(written(ours))

    kept = [line for line in screen.history if line]
    script = [line for step in range(30) for line in (f"bar {step} done", f"printed {step}")]
    assert kept == [*(f"before {i}" for i in range(20)), *script]
    assert (screen.top, screen.bottom) == (0, ROWS - 1)


@pytest.mark.parametrize("term", ["dumb", ""])
def test_a_terminal_without_escape_sequences_is_left_alone(
    terminal: tuple[int, TextIO], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, term: str
) -> None:
    monkeypatch.setenv("TERM", term)
    if not term:
        monkeypatch.delenv("TERM")
    ours, theirs = terminal

    with StatusLine(tmp_path / "progress.json", theirs):
        pass

    assert written(ours) == ""


def test_a_window_of_few_rows_is_left_alone(terminal: tuple[int, TextIO], tmp_path: Path) -> None:
    ours, theirs = terminal
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 3, COLUMNS, 0, 0))

    with StatusLine(tmp_path / "progress.json", theirs):
        pass

    assert written(ours) == ""


def check_on_a_terminal(folder: Path, cache_home: Path, script: str, *options: str, code: int) -> str:
    """All that `flatout check` and its script write to a terminal, until it ends with this exit code."""
    (folder / "train.py").write_text(textwrap.dedent(script))
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache_home), "OMP_NUM_THREADS": "1", "TERM": "xterm"}
    command = [sys.executable, "-c", "from flatout.app.cli import main; main()", "check", *options, "train.py"]
    child = subprocess.Popen(
        command, cwd=folder, env=environment, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
    )
    os.close(theirs)
    chunks = []
    while True:
        try:
            chunk = os.read(ours, 1 << 16)
        except OSError:  # EIO: the last program closed its end
            break
        if not chunk:
            break
        chunks.append(chunk)
    os.close(ours)
    assert child.wait(timeout=60) == code
    return b"".join(chunks).decode()


@pytest.mark.slow
@pytest.mark.long
def test_a_check_on_a_terminal_tells_how_far_it_is_and_leaves_a_clean_screen(tmp_path: Path, cache_home: Path) -> None:
    text = check_on_a_terminal(tmp_path, cache_home, SCRIPT, code=0)

    assert "flatout: starting" in text
    assert "flatout: timing again, " in text and " s left" in text
    screen = Terminal(ROWS, COLUMNS)
    screen.feed(text)
    assert (screen.top, screen.bottom) == (0, ROWS - 1)
    assert not any("flatout: " in line for line in screen.history)
    shown = [line for line in screen.history if line.startswith(("bar", "line"))]
    script = [line for step in range(10, 61, 10) for line in (f"bar {step:3}/60", f"line {step}")]
    assert [line for line in shown if not line.startswith("line ")] == script[::2]
    assert [line for line in shown if line in script] == script
    assert any("a training step" in line for line in screen.history)


@pytest.mark.slow
@pytest.mark.long
def test_quiet_shows_no_line(tmp_path: Path, cache_home: Path) -> None:
    text = check_on_a_terminal(tmp_path, cache_home, "print('hello')", "--quiet", code=3)

    assert "flatout: " not in text
    assert "\x1b7" not in text and "\x1b[r" not in text
    assert "hello" in text and "No step was seen" in text
