"""What works where the system is not Linux, as far as one can see on Linux: what only Linux or POSIX has is taken away.

A file `sitecustomize.py` does that before anything else in a process is imported. It is not macOS or Windows: those have other
compilers, other signals and other builds of torch.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

LIKE_MACOS: Final = """
import builtins, io, os
for name in ("sched_getaffinity", "sched_setaffinity", "pidfd_open"):
    if hasattr(os, name):
        delattr(os, name)
def without_proc(function):
    def inner(path, *args, **kwargs):
        if isinstance(path, (str, os.PathLike)) and os.fspath(path).startswith(("/proc", "/sys/")):
            raise FileNotFoundError(2, "No such file or directory", str(path))
        return function(path, *args, **kwargs)
    return inner
for module, names in ((builtins, ["open"]), (io, ["open"]), (os, ["open", "stat", "listdir", "scandir", "readlink"])):
    for name in names:
        setattr(module, name, without_proc(getattr(module, name)))
"""
LIKE_WINDOWS: Final = """
import os, signal, sys
# of Python itself, which is still the one for Linux
import asyncio, concurrent.futures, ctypes.util, multiprocessing.util, pathlib, platform, shutil, subprocess, tempfile, uuid
for name in (
    "fork forkpty getuid geteuid getgid getegid killpg setsid getpgid setpgid sched_getaffinity sched_setaffinity mkfifo "
    "getloadavg O_NOFOLLOW O_NONBLOCK O_DIRECTORY O_CLOEXEC WNOWAIT WEXITED P_PID fchmod chown fchown sysconf"
).split():
    if hasattr(os, name):
        delattr(os, name)
for name in (
    "SIGHUP SIGKILL SIGUSR1 SIGUSR2 SIGCHLD SIGSTOP SIGCONT SIGALRM SIGPIPE SIGTSTP SIGQUIT SIGRTMIN "
    "pthread_sigmask sigwait setitimer alarm"
).split():
    if hasattr(signal, name):
        delattr(signal, name)
class NotThere:
    def find_spec(self, name, path=None, target=None):
        if name in ("fcntl", "resource", "termios", "pty", "tty", "pwd", "grp"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, NotThere())
for name in ("fcntl", "resource", "termios", "pty", "tty", "pwd", "grp"):
    sys.modules.pop(name, None)
"""
TRAIN: Final = """
import torch
net = torch.nn.Linear(16, 4)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(3000):
    optimizer.zero_grad()
    net(torch.randn(8, 16)).square().mean().backward()
    optimizer.step()
"""
SIZES: Final = "hidden = 1024\nlayers = 8\nheads = 8\nvocab = 32000\nseq = 1024\n"

pytestmark = pytest.mark.slow


def typed_on(system: str, folder: Path, words: str) -> subprocess.CompletedProcess[str]:
    """`flatout WORDS` where that has been taken away."""
    (folder / "system").mkdir(exist_ok=True)
    (folder / "system" / "sitecustomize.py").write_text(system)
    (folder / "train.py").write_text(TRAIN)
    (folder / "sizes.toml").write_text(SIZES)
    environment = {**os.environ, "PYTHONPATH": str(folder / "system"), "COLUMNS": "120", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-m", "flatout", *words.split()],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("doctor", "the load of other processes is not seen"),
        ("check --no-trials --seconds 2 train.py", "a training step"),
        ("run --plan plan.toml train.py", ""),
    ],
)
@pytest.mark.long
def test_scripts_are_run_without_what_only_linux_has(words: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text('version = 1\nscript = "train.py"\n')
    done = typed_on(LIKE_MACOS, tmp_path, words)
    assert done.returncode == 0, done.stderr
    assert said in " ".join(done.stdout.split())
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ("-h", 0, "Find what is slow"),
        ("rules not-compiled", 0, "overhead.not-compiled"),
        ("fit --model sizes.toml", 0, "it holds:"),
        ("scale --model sizes.toml --gpus 8xh100-sxm --batch 8", 0, "data sheets"),
        ("simulate --gpus 1024", 0, "goodput"),
        ("runs", 0, "no run"),
        ("doctor", 0, "call them in WSL 2"),
        ("check train.py", 2, "`flatout check` runs scripts on Linux and macOS; on Windows call it in WSL 2"),
        ("tune train.py", 2, "on Windows call it in WSL 2"),
        ("check -h", 0, "flatout check"),
    ],
)
def test_records_and_plans_need_no_posix_and_scripts_say_that_they_do(
    words: str, code: int, said: str, tmp_path: Path
) -> None:
    done = typed_on(LIKE_WINDOWS, tmp_path, words)
    assert done.returncode == code, done.stderr
    assert said in " ".join((done.stdout + done.stderr).split())
    assert "Traceback" not in done.stderr
