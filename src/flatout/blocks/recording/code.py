"""The code of a run, brought to safety without touching the user's index, and what it runs in: versions, hardware, variables."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from hashlib import sha256
from importlib.metadata import distributions
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import torch
import torch.distributed as dist

from flatout.core.errors import CaptureError
from flatout.core.files import write_whole_file
from flatout.core.records.run import Code, FileLeftOut, Surroundings
from flatout.core.runtime.cores import usable_cores
from flatout.core.secrets import is_secret_file, is_secret_text, without_secret_values

CREDENTIAL: Final = "it looks like a credential"
"""Why a value is not stored."""
PATCH: Final = "code/changes.patch"
FILES: Final = "code/files"
_SOURCES: Final = frozenset(
    f".{ending}"
    for ending in (
        *("py", "pyi", "pyx", "ipynb", "c", "h", "cpp", "hpp", "cu", "cuh", "rs", "sh", "jinja", "md", "txt"),
        *("toml", "yaml", "yml", "json", "cfg", "ini", "tsv", "csv"),
    )
)
_MOST_BYTES: Final = 1 << 20
_MOST_CHANGED_BYTES: Final = 64 << 20
_MOST_FILES: Final = 2000


def git(root: Path, *arguments: str, index: Path | None = None) -> bytes:
    """What git says in a folder, with its own index or another one. No optional lock is taken.

    Raises CaptureError when it fails, or is not there.
    """
    command = ["git", "-C", str(root), *arguments]
    variables = {"GIT_OPTIONAL_LOCKS": "0", **({"GIT_INDEX_FILE": str(index)} if index is not None else {})}
    try:
        done = subprocess.run(command, capture_output=True, check=False, env={**os.environ, **variables})
    except OSError as e:
        raise CaptureError(f"git cannot be run: {e}") from e
    if done.returncode:
        raise CaptureError(
            f"git {' '.join(arguments[:2])} failed in '{root}': {done.stderr.decode(errors='replace').strip()}"
        )
    return done.stdout


def _difference(root: Path, *arguments: str) -> bytes:
    """`git diff` of a work tree from a copy of its index: git writes into the index of files that were touched and not changed,
    whatever it is told of locks. The copy is as old as the index: git looks into files that are no older."""
    own = root / os.fsdecode(git(root, "rev-parse", "--git-path", "index")).strip()
    with TemporaryDirectory(prefix="flatout-index-") as folder:
        return git(root, "diff", *arguments, index=Path(shutil.copy2(own, Path(folder) / "index")))


def root_of(folder: Path) -> tuple[Path, bool]:
    """The top of the git work tree that a folder lies in, and True; else the folder itself, and False."""
    try:
        return Path(os.fsdecode(git(folder, "rev-parse", "--show-toplevel")).strip()), True
    except CaptureError:
        return folder, False


def keep_code(folder: Path, into: Path) -> tuple[Code, list[FileLeftOut]]:
    """Write what is needed to have the code of `folder` again into the run's folder `into`."""
    root, is_git = root_of(folder)
    left_out: list[FileLeftOut] = []
    (into / "code").mkdir(exist_ok=True)
    if not is_git:
        names = sorted(os.path.relpath(os.path.join(at, n), root) for at, _, found in _walk(root) for n in found)
        stored = _keep_files(root, names, into, left_out)
        return Code(root=str(root), untracked=tuple(stored), sources=sums(root, stored)), left_out
    head = _or_nothing(root, "rev-parse", "HEAD")
    changed = _names(_difference(root, "--name-only", "-z", "HEAD")) if head else []
    secret = [name for name in changed if _why_not(root, name, left_out, most_bytes=_MOST_CHANGED_BYTES)]
    if head:
        excluded = [f":(top,exclude,literal){name}" for name in secret]
        patch = _difference(root, "--binary", "--full-index", "HEAD", "--", ":/", *excluded)
        write_whole_file(into / PATCH, patch)
    untracked = _names(git(root, "ls-files", "--others", "--exclude-standard", "-z", "--full-name", ":/"))
    untracked = [name for name in untracked if not (root / name).resolve().is_relative_to(into.parent.resolve())]
    names = untracked if head else _names(git(root, "ls-files", "-z", "--full-name", ":/")) + untracked
    stored = _keep_files(root, names, into, left_out)
    return (
        Code(
            root=str(root),
            revision=head,
            branch=_or_nothing(root, "rev-parse", "--abbrev-ref", "HEAD"),
            changed=tuple(name for name in changed if name not in secret),
            untracked=tuple(stored),
            sources=sums(root, [*changed, *stored]),
        ),
        left_out,
    )


def read_sources(root: Path) -> list[str]:
    """Files under `root` that python has read as modules, the script among them."""
    files = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    top = os.path.realpath(root) + os.sep
    found = {os.path.realpath(f) for f in files if f}
    inside = {os.path.relpath(f, top) for f in found if f.startswith(top) and f.endswith(".py")}
    return sorted(name for name in inside if "site-packages" not in name)


def sums(root: Path, names: Iterable[str]) -> dict[str, str]:
    """SHA-256 of files that are there."""
    return {n: sha256((root / n).read_bytes()).hexdigest() for n in sorted(set(names)) if (root / n).is_file()}


def _keep_files(root: Path, names: Iterable[str], into: Path, left_out: list[FileLeftOut]) -> list[str]:
    stored: list[str] = []
    for name in names:
        if Path(name).suffix not in _SOURCES and Path(name).name != "Makefile":
            left_out.append(FileLeftOut(name=name, because="it is no source file"))
        elif len(stored) >= _MOST_FILES:
            left_out.append(FileLeftOut(name=name, because=f"{_MOST_FILES} files are stored at most"))
        elif not _why_not(root, name, left_out):
            target = into / FILES / name
            target.parent.mkdir(parents=True, exist_ok=True)
            write_whole_file(target, (root / name).read_bytes())
            stored.append(name)
    return stored


def _why_not(root: Path, name: str, left_out: list[FileLeftOut], *, most_bytes: int = _MOST_BYTES) -> str:
    """Why a file is not stored; '' when it is."""
    path = root / name
    because = ""
    if is_secret_file(name):
        because = "it looks like a file for credentials"
    elif path.is_symlink() and not path.resolve().is_relative_to(root.resolve()):
        because = "it is a link to outside of the code"
    elif path.is_file():
        if path.stat().st_size > most_bytes:
            because = f"it has more than {most_bytes >> 20} MiB"
        elif is_secret_text(path.read_bytes().decode(errors="replace")):
            because = "it holds something like a credential"
    if because:
        left_out.append(FileLeftOut(name=name, because=because))
    return because


def _walk(root: Path) -> Iterable[tuple[str, list[str], list[str]]]:
    for at, folders, names in os.walk(root):
        folders[:] = [f for f in folders if not f.startswith(".") and f not in ("__pycache__", "node_modules", "runs")]
        yield at, folders, [n for n in names if Path(n).suffix in _SOURCES]


def _names(listed: bytes) -> list[str]:
    return [os.fsdecode(name) for name in listed.split(b"\0") if name]


def _or_nothing(root: Path, *arguments: str) -> str:
    try:
        return os.fsdecode(git(root, *arguments)).strip()
    except CaptureError:
        return ""


# -- what it runs in ---------------------------------------------------------------------------------------------------------


_STORED: Final = re.compile(
    r"((OMP|MKL|KMP|GOMP|OPENBLAS|CUDA|CUDNN|NCCL|PYTORCH|MALLOC|ONEDNN|DNNL)_|CUBLAS|TORCH).*"
    r"|PYTHONHASHSEED|LD_PRELOAD|WORLD_SIZE|RANK|LOCAL_RANK|SLURM_JOB_ID"
)


def surroundings_here() -> Surroundings:
    """The surroundings of this process: versions, device, threads, settings."""
    return Surroundings(
        python=platform.python_version(),
        torch=str(torch.__version__),
        platform=platform.platform(),
        device=torch.cuda.get_device_name() if torch.cuda.is_available() else f"cpu, {platform.machine()}",
        driver=str(torch.version.cuda or ""),
        num_cores=usable_cores(),
        num_threads=torch.get_num_threads(),
        num_interop_threads=torch.get_num_interop_threads(),
        world_size=dist.get_world_size() if dist.is_initialized() else 1,
        environment=allowed(os.environ)[0],
        settings={
            "deterministic algorithms": str(torch.are_deterministic_algorithms_enabled()),
            "float32 products": torch.get_float32_matmul_precision(),
            "default dtype": str(torch.get_default_dtype()),
            "cudnn benchmark": str(torch.backends.cudnn.benchmark),
            "cpu capability": torch.backends.cpu.get_cpu_capability(),
        },
        packages=packages(),
    )


def allowed(environment: Mapping[str, str]) -> tuple[dict[str, str], list[FileLeftOut]]:
    """The variables that are stored, and those that would be, but look like credentials."""
    stored, secret = without_secret_values(
        {name: environment[name] for name in sorted(environment) if _STORED.fullmatch(name)}
    )
    return stored, [FileLeftOut(name=f"${name}", because=CREDENTIAL) for name in secret]


def packages() -> dict[str, str]:
    """Name and version of all that is installed; of two with one name, the one that python would import."""
    found: dict[str, str] = {}
    for one in distributions():
        name = one.metadata["Name"]
        if name:
            found.setdefault(name.lower().replace("_", "-"), one.version)
    return dict(sorted(found.items()))
