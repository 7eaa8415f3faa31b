"""A run run again: its code rebuilt beside the user's, its first steps compared bit by bit, and a difference explained."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from itertools import dropwhile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final, Literal, NamedTuple

from flatout.blocks.recording.code import FILES, PATCH, git
from flatout.blocks.recording.run import COMPILED, RECORD, REPLAY, read_digests, read_run
from flatout.core.errors import CaptureError, VerificationError
from flatout.core.files import path_inside
from flatout.core.records.run import RunRecord, StepDigests
from flatout.core.runtime.cache_folder import require_trusted_library
from flatout.core.secrets import redacted_text

_REVISION: Final = re.compile(r"[0-9a-f]{7,64}")

Cause = Literal["code", "package", "threads", "data order", "data", "settings", "hardware", "kernel choice"]
_MOST_COPIED_BYTES: Final = 1 << 30
_OUTPUTS: Final = frozenset(
    [
        "runs",
        "output",
        "outputs",
        "checkpoints",
        "ckpt",
        "logs",
        "log",
        "wandb",
        "mlruns",
        "lightning_logs",
        "tensorboard",
    ]
)
"""Where scripts write; what lies there is nothing that a first step reads."""
_MADE: Final = frozenset(
    (".venv", "venv", "__pycache__", "build", "dist", "node_modules", ".mypy_cache", ".ruff_cache", ".pytest_cache")
)
"""What tools make."""
_THREADS: Final = ("$OMP_", "$MKL_", "$KMP_", "$GOMP_", "$OPENBLAS_")
_OF_A_RANK: Final = frozenset(("WORLD_SIZE", "RANK", "LOCAL_RANK"))
_TORCHRUN, _ELASTIC = "torch.distributed.run", "TORCHELASTIC_"
_UNIMPORTANT: Final = frozenset(("SLURM_JOB_ID", "LD_PRELOAD")) | _OF_A_RANK


class ReplayDifference(NamedTuple):
    """The first thing that came out otherwise: `what` is 'inputs', 'loss', 'gradient', 'weight' or 'end'; `name` a tensor's."""

    step: int
    what: str
    name: str = ""


class ReplayReason(NamedTuple):
    """What differs between two runs and can change numbers."""

    cause: Cause
    text: str


class Replayed(NamedTuple):
    """How a replay came out: equal over `num_steps` steps when `difference` is None. `reasons`: the likeliest first."""

    num_steps: int
    difference: ReplayDifference | None
    reasons: tuple[ReplayReason, ...]


def replay(path: Path, *, num_steps: int = 8, is_here: bool = False, timeout_s: float = 600.0) -> Replayed:
    """Run the first steps of a run again and compare.

    The code is rebuilt in a scratch folder, and the variables and threads are those of the run; `is_here`: with the code and
    the variables as they are now. A run of several ranks is started on as many, on this machine; what its first rank saw is
    compared. Raises RecordError for a folder without a run, CaptureError when the code cannot be rebuilt, VerificationError
    when the script does not come as far.
    """
    record, before = read_run(path), read_digests(path)
    if not before:
        raise VerificationError(f"'{path}' holds no steps; only a run that has stepped an optimizer can be compared")
    num_steps = min(num_steps, len(before))
    with TemporaryDirectory(prefix="flatout-replay-") as scratch, ExitStack() as stack:
        into = Path(scratch) / "run"
        into.mkdir()
        root = Path(record.code.root) if is_here else _rebuilt(path, record, Path(scratch) / "code", stack)
        message = _run_again(path, record, root, into, num_steps, is_here=is_here, timeout_s=timeout_s)
        after = read_digests(into)
        if not after:
            raise VerificationError(f"the run ended again before its first step: {message}")
        difference = first_step_difference(before[:num_steps], after[:num_steps])
        if difference is None:
            return Replayed(num_steps, None, ())
        found = _of_the_data(before, after, difference) + reasons_between(record, read_run(into))
        reasons = tuple(sorted(found, key=lambda r: _likeliness(r, difference))) or (_KERNELS,)
        return Replayed(min(len(after), num_steps), difference, reasons)


def _run_again(
    path: Path, record: RunRecord, root: Path, into: Path, num_steps: int, *, is_here: bool, timeout_s: float
) -> str:
    """Start the command on the code in `root`, recording into `into`; its last message."""
    folder = root / record.folder
    if not folder.is_dir():
        raise CaptureError(f"the run was in '{record.folder}' below '{root}', and that is not there any more")
    environment = dict(os.environ)
    if not is_here:
        recorded = record.surroundings.environment
        environment = {k: v for k, v in environment.items() if k in recorded or not f"${k}".startswith(_THREADS)}
        environment |= recorded
        environment["PYTHONPATH"] = _moved(environment.get("PYTHONPATH", ""), Path(record.code.root), root)
    for name in [n for n in environment if n in _OF_A_RANK or n.startswith(_ELASTIC)]:
        del environment[name]
    compiled = path / COMPILED
    if compiled.is_file():
        require_trusted_library(compiled)  # kernels, and pickles of torch's
    asked = {
        "folder": str(into),
        "steps": num_steps,
        "compiled": str(compiled.absolute()) if compiled.is_file() else "",
    }
    environment[REPLAY] = json.dumps(asked)
    command = [_moved(part, Path(record.code.root), root) for part in _command(record)]
    try:
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired as e:
        raise VerificationError(
            f"the run did not come to step {num_steps} within {timeout_s:.0f} s; give it more with --timeout"
        ) from e
    message = (done.stderr or done.stdout).strip().splitlines()[-3:]
    return redacted_text(" | ".join(message)) or f"exit code {done.returncode}"


def _command(record: RunRecord) -> list[str]:
    """What is started: python, or torchrun for as many ranks as there were, all of them here."""
    num_ranks = max(record.surroundings.world_size, int(record.surroundings.environment.get("WORLD_SIZE", "1")))
    if num_ranks == 1:
        return [sys.executable, *record.command]
    handed = [*dropwhile(lambda part: part == "-u", record.command)]  # which torchrun adds
    return [sys.executable, "-m", _TORCHRUN, "--standalone", f"--nproc-per-node={num_ranks}", *handed]


_KERNELS: Final = ReplayReason(
    "kernel choice",
    "code, packages, threads and data are the same: kernels were chosen otherwise, or sum in no fixed order",
)


def first_step_difference(before: Sequence[StepDigests], after: Sequence[StepDigests]) -> ReplayDifference | None:
    """The first step, and in it the first of inputs, losses, gradients and weights, that is not the same."""
    for one, two in zip(before, after, strict=False):
        if one.inputs != two.inputs:
            return ReplayDifference(one.step, "inputs")
        if one.losses != two.losses:
            return ReplayDifference(one.step, "loss")
        for what, first, second in (("gradient", one.gradients, two.gradients), ("weight", one.weights, two.weights)):
            name = next((n for n in {**first, **second} if first.get(n) != second.get(n)), None)
            if name is not None:
                return ReplayDifference(one.step, what, name)
    return ReplayDifference(len(after), "end") if len(after) < len(before) else None


def reasons_between(one: RunRecord, two: RunRecord) -> tuple[ReplayReason, ...]:
    """What differs between two runs and can change numbers; the second may be a replay of the first in another folder."""
    found = [
        ReplayReason("code", _of_a_file(one, two, name, pair))
        for name, pair in _differing(one.code.sources, two.code.sources)
    ]
    for cause, values in _VALUES.items():
        for name, (before, after) in _differing(values(one), values(two)):
            actual: Cause = "threads" if name.startswith(_THREADS) else cause
            was, now = ("none" if value is None else value for value in (before, after))
            found.append(ReplayReason(actual, f"{name}: {was} -> {now}"))
    return tuple(found)


def _settings(record: RunRecord) -> dict[str, str]:
    here = record.surroundings
    important = {k: v for k, v in here.environment.items() if k not in _UNIMPORTANT and not k.startswith(_ELASTIC)}
    config = {f"config {k}": v for k, v in record.config.items()}
    return config | here.settings | {f"${k}": v for k, v in important.items()}


def _counts(record: RunRecord) -> dict[str, str]:
    here = record.surroundings
    counts = {
        "threads": here.num_threads,
        "threads between operators": here.num_interop_threads,
        "ranks": here.world_size,
    }
    return {name: str(count) for name, count in counts.items()}


_VALUES: Final[dict[Cause, Callable[[RunRecord], Mapping[str, str]]]] = {
    "package": lambda r: {"python": r.surroundings.python, "torch": r.surroundings.torch} | r.surroundings.packages,
    "threads": _counts,
    "settings": _settings,
    "hardware": lambda r: {"device": r.surroundings.device},
}


def _of_a_file(one: RunRecord, two: RunRecord, name: str, pair: tuple[str | None, str | None]) -> str:
    kind = "untracked file" if name in one.code.untracked or name in two.code.untracked else "file"
    return f"{kind} '{name}' {'is gone' if pair[1] is None else 'is new' if pair[0] is None else 'changed'}"


def _of_the_data(
    before: Sequence[StepDigests], after: Sequence[StepDigests], difference: ReplayDifference
) -> tuple[ReplayReason, ...]:
    if difference.what != "inputs":
        return ()
    one, two = (Counter(row for digests in side for row in digests.rows) for side in (before[: len(after)], after))
    shared = sum((one & two).values()) / max(1, sum(one.values()))
    if one == two and one:
        return (ReplayReason("data order", "the same samples came in another order"),)
    if shared > 0.05:
        return (ReplayReason("data order", f"{shared:.0%} of the samples came too, in other steps or another order"),)
    return (
        ReplayReason(
            "data", "models were given other numbers: other files, or random numbers of workers that are not keyed"
        ),
    )


def _likeliness(reason: ReplayReason, difference: ReplayDifference) -> int:
    """The likeliest first: what was changed by a person before what follows of it, and data first where data differ."""
    order = ("code", "package", "threads", "settings", "data order", "data", "hardware", "kernel choice")
    if difference.what == "inputs" and reason.cause in ("threads", "settings", "hardware"):
        return len(order)  # they hardly change what a model is given
    return order.index(reason.cause)


def _differing(one: Mapping[str, str], two: Mapping[str, str]) -> list[tuple[str, tuple[str | None, str | None]]]:
    names = sorted({*one, *two})
    return [(n, (one.get(n), two.get(n))) for n in names if one.get(n) != two.get(n)]


def _rebuilt(path: Path, record: RunRecord, into: Path, stack: ExitStack) -> Path:
    """The run's code as it was: the revision, the changes, the untracked files, and the data beside them."""
    code, root = record.code, Path(record.code.root)
    if code.revision:
        if not _REVISION.fullmatch(code.revision):
            raise CaptureError(f"'{path / RECORD}' is damaged: '{code.revision[:80]}' is no revision")
        git(root, "worktree", "add", "--detach", "--force", str(into), code.revision)
        stack.callback(git, root, "worktree", "remove", "--force", str(into))
        patch = path / PATCH
        if patch.is_file() and patch.stat().st_size:
            git(into, "apply", "--binary", "--whitespace=nowarn", str(patch.absolute()))
    else:
        into.mkdir()
    for name in code.untracked:
        try:
            stored, target = path_inside(path / FILES, name), path_inside(into, name)
        except OSError as e:
            raise CaptureError(f"'{path / RECORD}' is damaged: {e.strerror or e}") from e
        if not stored.is_file():
            raise CaptureError(f"'{name}' is missing from '{path / FILES}'; the run's folder was changed")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(stored, target)
    _bring_the_rest(root, into)
    return into


def _bring_the_rest(root: Path, into: Path) -> None:
    """Data beside the code, which no run keeps: what the rebuilt folder lacks.

    Copied, so that what the script writes is not written over the user's files; what is too large for that is linked.
    """
    for entry in root.iterdir() if root.is_dir() else ():
        target = into / entry.name
        if entry.name.startswith(".git") or entry.name in _MADE | _OUTPUTS:
            continue
        if target.is_dir() and entry.is_dir() and not entry.is_symlink():
            _bring_the_rest(entry, target)
        elif target.exists() or entry.suffix in (".py", ".log"):
            continue
        elif _size(entry) > _MOST_COPIED_BYTES:
            target.symlink_to(entry)
        elif entry.is_dir():
            shutil.copytree(entry, target, symlinks=True)
        else:
            shutil.copy2(entry, target)


def _size(path: Path) -> int:
    """Bytes of a file, or of all files below a folder; more than the limit as soon as that is certain."""
    if not path.is_dir():
        return path.stat().st_size if path.is_file() else 0
    total = 0
    for at, _, names in os.walk(path):
        total += sum(os.lstat(os.path.join(at, name)).st_size for name in names)
        if total > _MOST_COPIED_BYTES:
            break
    return total


def _moved(text: str, old: Path, new: Path) -> str:
    return text.replace(str(old), str(new)) if old != new else text
