"""The scripts of the manifest: what they are, where their checkout lies, how one is laid out to run unchanged."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import struct
import subprocess
import sys
import tomllib
from dataclasses import dataclass, field
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
HOOKS = HERE / "hooks"
ROOT = HERE.parents[1]
BUILD = ROOT / "build" / "world"
LONGEST_S = 900.0
"""A process that takes longer is ended."""
_MACHINE = """
import json, os, pathlib, torch
lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
cpu = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "a CPU")
name = torch.cuda.get_device_name() if torch.cuda.is_available() else cpu
print(json.dumps({"name": name, "num_cores": len(os.sched_getaffinity(0)), "torch_version": str(torch.__version__)}))
"""


@dataclass(frozen=True, kw_only=True)
class Script:
    """One script with its arguments; the manifest's README says what the fields mean."""

    name: str
    repository: str
    commit: str
    licence: str
    path: str
    kind: str = "training"
    folder: str = "."
    arguments: tuple[str, ...] = ()
    is_module: bool = False
    stand_ins: tuple[dict[str, Any], ...] = ()
    requires: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    timer: str = "optimizer"
    calls_per_step: int = 0
    cures: tuple[dict[str, Any], ...] = ()
    note: str = ""

    @property
    def command(self) -> list[str]:
        """The script and its arguments, as python takes them."""
        return [*self.named, *self.arguments]

    @property
    def named(self) -> list[str]:
        """What names the script after `python` or a verb of flatout."""
        return [*(["-m"] if self.is_module else []), self.path]


def read_manifest(only: list[str] | None = None, folder: Path = HERE / "manifest") -> list[Script]:
    """All scripts of the manifest, one TOML file a repository, in the order of their names."""
    scripts = []
    for path in sorted(folder.glob("*.toml")):
        table = tomllib.loads(path.read_text())
        shared = {key: table[key] for key in ("repository", "commit", "licence")}
        for entry in table["script"]:
            for key in ("arguments", "requires", "stand_ins"):
                entry[key] = tuple(entry.get(key, ()))
            entry["cures"] = tuple(entry.pop("cure", ()))
            scripts.append(Script(**shared, **entry))
    names = [s.name for s in scripts]
    if len(set(names)) != len(names):
        raise SystemExit(f"two scripts of one name: {sorted(n for n in set(names) if names.count(n) > 1)}")
    return [s for s in scripts if not only or any(s.name == o or s.repository == o for o in only)]


def checkout_of(script: Script, checkouts: Path) -> Path:
    """The repository's folder under the folder of checkouts: OWNER/NAME, OWNER+NAME or NAME, a git folder or a plain one."""
    owner, name = script.repository.split("/")
    for candidate in (f"{owner}/{name}", f"{owner}+{name}", f"{owner}__{name}", name):
        for inner in ("repo/.git", "repo", ".git", "."):
            path = checkouts / candidate / inner
            if (path / "HEAD").exists() or (inner == "." and path.is_dir()):
                return path
    raise FileNotFoundError(
        f"no checkout of {script.repository} in {checkouts}: expected {owner}/{name}, {owner}+{name} or {name}"
    )


def lay_out(script: Script, checkouts: Path, into: Path) -> Path:
    """Write the manifest's commit and the stand-in data into a new folder; the working folder of the script."""
    source = checkout_of(script, checkouts)
    shutil.rmtree(into, ignore_errors=True)
    into.mkdir(parents=True)
    if (source / "HEAD").exists():
        write_commit(source, script.commit, into)
    else:
        shutil.copytree(source, into, dirs_exist_ok=True)
    folder = into / script.folder
    for stand_in in script.stand_ins:
        options = {key: value for key, value in stand_in.items() if key not in ("make", "at")}
        arguments = [f"--{key}={value}" for key, value in options.items()]
        maker = [sys.executable, str(HERE / "stand_ins.py"), stand_in["make"], str(folder / stand_in["at"]), *arguments]
        subprocess.run(maker, check=True, env=os.environ | {"PYTHONPATH": str(HOOKS), "WORLD_TORCHVISION": "1"})
    return folder


def write_commit(git: Path, commit: str, into: Path) -> None:
    """Write the files of a commit; large ones that a partial copy of the repository lacks are left out."""
    listed = subprocess.run(
        ["git", f"--git-dir={git}", "ls-tree", "-r", "-z", commit], capture_output=True, check=False
    )
    if listed.returncode:
        raise FileNotFoundError(f"{git} has no commit {commit}: {listed.stderr.decode()[:200]}")
    entries = [
        line.split(None, 2)[:2] + line.split(None, 2)[2].split(b"\t", 1) for line in listed.stdout.split(b"\0")[:-1]
    ]
    wanted = b"".join(name + b"\n" for _, kind, name, _ in entries if kind == b"blob")
    command = ["git", f"--git-dir={git}", "cat-file", "--batch", "--buffer"]
    blobs = BytesIO(subprocess.run(command, input=wanted, capture_output=True, check=True).stdout)
    for mode, kind, _, name in entries:
        if kind != b"blob":
            continue
        head = blobs.readline().split()
        if head[1] != b"blob":
            continue
        data, path = blobs.read(int(head[2])), into / name.decode()
        blobs.read(1)
        path.parent.mkdir(parents=True, exist_ok=True)
        if mode == b"120000":
            path.symlink_to(data.decode())
        else:
            path.write_bytes(data)


def shares_of(num_jobs: int) -> list[list[int]]:
    """The usable processors in so many equal shares; those that are threads of one core are in one share where that goes."""
    usable = os.sched_getaffinity(0)
    ordered = sorted(usable, key=lambda cpu: (_threads_of_core(cpu), cpu))
    size = len(ordered) // num_jobs
    if not size:
        raise SystemExit(f"{num_jobs} jobs on {len(ordered)} processors: give --jobs {len(ordered)} at most")
    return [ordered[job * size : (job + 1) * size] for job in range(num_jobs)]


def _threads_of_core(cpu: int) -> list[int]:
    """The processors that share a core with this one, and itself."""
    path = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
    listed = path.read_text().strip() if path.exists() else str(cpu)
    ends = [part.partition("-") for part in listed.split(",")]
    return [one for low, _, high in ends for one in range(int(low), int(high or low) + 1)]


def completed(
    command: list[str], folder: Path, environment: dict[str, str], *, timeout_s: float, cores: list[int] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command in a folder, on some cores, with nothing to read; what it printed. Raises subprocess.TimeoutExpired."""
    pinned = ["taskset", "-c", ",".join(map(str, cores))] if cores else []
    return subprocess.run(
        [*pinned, *command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
        timeout=timeout_s,
        stdin=subprocess.DEVNULL,
    )


def machine_of(python: str, cores: list[int]) -> dict[str, Any]:
    """What each script runs on."""
    found = completed([python, "-c", _MACHINE], HERE, dict(os.environ), timeout_s=LONGEST_S, cores=cores)
    return dict(json.loads(found.stdout))


def edit(folder: Path, edits: list[dict[str, Any]]) -> None:
    """Apply an expert's cure to the laid-out copy: each edit replaces one short text, found exactly `times` times (1)."""
    for change in edits:
        path = folder / change["file"]
        text = path.read_text()
        found = text.count(change["find"])
        if found != change.get("times", 1):
            raise SystemExit(
                f"{change['file']}: {change['find']!r} is there {found} times, not {change.get('times', 1)}"
            )
        path.write_text(text.replace(change["find"], change["replace"]))


def stamps_of(marks: Path) -> list[tuple[int, float]]:
    """The stamps of the process that made most of them."""
    files = sorted(marks.parent.glob(f"{marks.name}.*"), key=lambda p: p.stat().st_size)
    if not files:
        return []
    data = files[-1].read_bytes()
    return list(struct.iter_unpack("<Bd", data[: len(data) // 9 * 9]))


_FIRST_STAMPS = 12
"""Optimizers of the script step among the first so many stamps; copies that a trial times come later, and are left out."""


def step_times(stamps: list[tuple[int, float]], calls_per_step: int, *, skip: int = 3) -> list[float]:
    """Seconds of each step: between stamps of the optimizer that steps least often, or every so many stamps of all of them."""
    own = {key for key, _ in stamps[:_FIRST_STAMPS]}
    stamps = [stamp for stamp in stamps if stamp[0] in own]
    if calls_per_step:
        times = [t for _, t in stamps][calls_per_step - 1 :: calls_per_step]
    else:
        by_key: dict[int, list[float]] = {}
        for key, time in stamps:
            by_key.setdefault(key, []).append(time)
        times = min((t for t in by_key.values() if len(t) >= len(stamps) / 50), key=len, default=[])
    gaps = [b - a for a, b in pairwise(times)]
    return gaps[skip:] if len(gaps) > 2 * skip else gaps


def median(values: list[float]) -> float | None:
    return statistics.median(values) if values else None
