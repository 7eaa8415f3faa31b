"""`flatout check`: run a script as it is, and say where its step's time goes."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Annotated, Final

import msgspec
import typer
from rich.console import Console

from flatout.cli.machine import cache_folder
from flatout.cli.outputs import Outputs
from flatout.cli.progress import StatusLine
from flatout.cli.ranks import (
    Rank,
    all_written,
    end_leftovers,
    evidence_path,
    gather,
    launch_command,
    launched_rank,
    shared_folder,
    wait_for_others,
)
from flatout.errors import CaptureError, UsageError
from flatout.records.record import to_json, write_file

if TYPE_CHECKING:
    from flatout.records.evidence import Evidence
    from flatout.session import Observation

_POLL_S: Final = 0.2
_PATIENCE_S: Final = 5.0
"""A script that ends this soon after the observation gets its report at the end; under a longer one it is printed at once."""


def check(
    context: typer.Context,
    target: Annotated[
        str | None, typer.Argument(metavar="SCRIPT", help="The script, as you would give it to python.")
    ] = None,
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[ARGS]...", help="The script's own arguments.")
    ] = None,
    module: Annotated[str | None, typer.Option("-m", metavar="MODULE", help="Run a module, like `python -m`.")] = None,
    json: Annotated[Path | None, typer.Option("--json", help="Write Evidence and findings to this file.")] = None,
    html: Annotated[Path | None, typer.Option("--html", help="Write the report as one HTML page to this file.")] = None,
    markdown: Annotated[
        Path | None, typer.Option("--markdown", help="Write a short report for a pull request to this file.")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option("--trace", help="Write one step as a trace for Perfetto; .gz packs it.")
    ] = None,
    seconds: Annotated[float, typer.Option(help="How long to observe steps, besides the few deep ones.")] = 30.0,
    stop: Annotated[bool, typer.Option("--stop", help="End the script when the observation is complete.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Show no progress line on the terminal.")] = False,
    nproc: Annotated[
        int | None, typer.Option("--nproc", help="Start the script as this many ranks on this machine, like torchrun.")
    ] = None,
) -> None:
    """Run SCRIPT unchanged, observe its steps, and report what makes them slow: line, cost, gain, edit.

    The script runs as under python, prints what it prints, and goes on undisturbed when enough has been seen.
    Several ranks: `--nproc 2`, or your own launcher: `torchrun ... -m flatout.cli check SCRIPT`; rank 0 reports them all.
    """
    from flatout.session import Observation

    if module is not None:
        own = ([target] if target is not None else []) + (arguments or [])
        name = module
    elif target is not None:
        own, name = arguments or [], target
    else:
        raise UsageError(
            "no script given; call `flatout check train.py -- --its --arguments` or `flatout check -m package.module`"
        )
    own = own[1:] if own[:1] == ["--"] else own
    outputs = Outputs(json=json, html=html, markdown=markdown, trace=trace)
    outputs.check()
    if seconds <= 0:
        raise UsageError(f"--seconds {seconds} must be above 0")
    if nproc is not None and nproc < 1:
        raise UsageError(f"--nproc {nproc} must be at least 1")
    observation = Observation(
        target=name,
        kind="module" if module is not None else "script",
        arguments=tuple(own),
        command=("python", *(("-m",) if module is not None else ()), name, *own),
        evidence_path="",
        machine_path=str(cache_folder()),
        observe_s=seconds,
        stop=stop,
    )
    launched = launched_rank(os.environ)
    if launched is not None:
        if nproc is not None:
            raise UsageError(f"--nproc {nproc} inside rank {launched.rank} of a launcher; give one of the two")
        raise typer.Exit(_run_as_rank(observation, launched, outputs))
    with tempfile.TemporaryDirectory(prefix="flatout-") as folder:
        if nproc is not None and nproc > 1:
            raise typer.Exit(_run_ranks(observation, Path(folder), nproc, outputs))
        raise typer.Exit(_run(observation, Path(folder), outputs, is_quiet=quiet))


def _run(observation: Observation, folder: Path, outputs: Outputs, *, is_quiet: bool) -> int:
    """Start the observed process, wait for it, print the report; its exit code."""
    path = folder / "evidence.json"
    progress = None if is_quiet or not sys.stderr.isatty() else folder / "progress.json"
    observation = msgspec.structs.replace(observation, progress_path=str(progress) if progress is not None else "")
    command = _request(observation, folder / "observation.json", evidence_path=path)
    code, told = _watch(
        command,
        is_complete=path.exists,
        tell=lambda: _tell(_read(path), Outputs(), 0, print_it=True),
        stop=observation.stop,
        progress=progress,
    )
    if not path.exists():
        if code == _REFUSED:
            return 2
        raise CaptureError(f"the script ended with code {code} before anything could be written (killed, or os._exit)")
    return _tell(_read(path), outputs, code, print_it=not told)


def _run_ranks(observation: Observation, folder: Path, nproc: int, outputs: Outputs) -> int:
    """Start `nproc` observed ranks under torch's launcher, wait for them, print one report; the launcher's exit code."""
    request = folder / "observation.json"
    _request(observation, request, evidence_path=folder, world_size=nproc)
    code, told = _watch(
        launch_command(nproc, request),
        is_complete=lambda: all_written(folder, nproc),
        tell=lambda: _tell(gather(folder, nproc), Outputs(), 0, print_it=True),
        stop=observation.stop,
    )
    end_leftovers(folder, nproc)
    if code and not any(folder.glob("rank*.json")) and not any(folder.glob("rank*.draft")):
        return code  # the ranks and their launcher have said why
    return _tell(gather(folder, nproc), outputs, code, print_it=not told)


def _run_as_rank(observation: Observation, rank: Rank, outputs: Outputs) -> int:
    """Observe the one rank that a launcher made this process; rank 0 reports all ranks of its host, the others are silent."""
    folder = shared_folder(os.environ, rank)
    request = folder / f"observation{rank.rank}.json"
    command = _request(observation, request, evidence_path=folder, world_size=rank.world_size)
    local = range(rank.rank - rank.rank % rank.local_world_size, rank.world_size)[: rank.local_world_size]
    code, told = _watch(
        command,
        is_complete=lambda: all(evidence_path(folder, r).exists() for r in local),
        tell=(lambda: _tell(gather(folder, rank.world_size), Outputs(), 0, print_it=True)) if rank.rank == 0 else None,
        stop=observation.stop,
    )
    own = evidence_path(folder, rank.rank)
    if code == _REFUSED and not own.exists():
        return 2
    if rank.rank == 0:
        wait_for_others(folder, local)
        code = _tell(gather(folder, rank.world_size), outputs, code, print_it=not told)
        shutil.rmtree(folder, ignore_errors=True)
    elif outputs.json is not None and rank.host_number and own.exists():
        # Rank 0 runs on another host and cannot see this file: `flatout report` merges what each host wrote.
        write_file(outputs.json.with_suffix(f".rank{rank.rank}.json"), own.read_bytes())
    return code


def _request(observation: Observation, request: Path, *, evidence_path: Path, world_size: int = 1) -> list[str]:
    """Write the request; the command that follows it."""
    full = msgspec.structs.replace(observation, evidence_path=str(evidence_path), world_size=world_size)
    write_file(request, to_json(full))
    return [sys.executable, "-m", "flatout.cli.observe", str(request)]


def _watch(
    command: list[str],
    *,
    is_complete: Callable[[], bool],
    tell: Callable[[], int] | None,
    stop: bool,
    progress: Path | None = None,
) -> tuple[int, bool]:
    """Run the command to its end: (its exit code, whether the report was printed while it went on).

    Meanwhile the terminal shows what the file `progress` says, if it is given.
    """
    child = subprocess.Popen(command)
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal tells the script too; it decides
    terminate = signal.signal(signal.SIGTERM, lambda *_: child.terminate())
    try:
        with StatusLine(progress or Path(), sys.stderr, is_wanted=progress is not None) as status:
            return _wait(child, status, is_complete=is_complete, tell=tell, stop=stop)
    finally:
        signal.signal(signal.SIGINT, previous)
        signal.signal(signal.SIGTERM, terminate)


_REFUSED: Final = 78
"""Exit code of the observed process when it has said itself why it could not start (EX_CONFIG)."""


def _wait(
    child: subprocess.Popen[bytes],
    status: StatusLine,
    *,
    is_complete: Callable[[], bool],
    tell: Callable[[], int] | None,
    stop: bool,
) -> tuple[int, bool]:
    """(exit code, whether the report was printed while the script went on).

    With `stop` an observed process ends itself when it is alone; one that swallows that, and ranks, are ended from here.
    """
    complete_at: float | None = None
    told = False
    while True:
        try:
            return _code(child.wait(timeout=_POLL_S)), told
        except subprocess.TimeoutExpired:
            status.update()
        if complete_at is None and is_complete():
            complete_at = monotonic()
            status.close()
        if complete_at is not None and stop and monotonic() - complete_at > _PATIENCE_S:
            _end(child)
            return 0, False
        if complete_at is not None and not told and monotonic() - complete_at > _PATIENCE_S:
            told = True
            if tell is not None:
                tell()
                Console(stderr=True).print("the script goes on, no longer observed; Ctrl-C ends it", style="dim")


def _end(child: subprocess.Popen[bytes]) -> None:
    """End a process that has been seen enough: politely, so that a launcher ends its ranks too, then for good."""
    child.terminate()
    try:
        child.wait(timeout=_PATIENCE_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def _read(path: Path) -> Evidence:
    from flatout.reporting.json_report import read_evidence

    return read_evidence(path.read_bytes())


def _tell(evidence: Evidence, outputs: Outputs, code: int, *, print_it: bool) -> int:
    from flatout.reporting.text import report
    from flatout.session import diagnose_all

    diagnosis = diagnose_all(evidence)
    if print_it:
        console = Console()
        console.print()
        console.print(report(evidence, diagnosis))
    outputs.write(evidence, diagnosis)
    return code if code or evidence.steps.num_timed else 1


def _code(returned: int) -> int:
    """The shell's convention for a process that a signal ended."""
    return 128 - returned if returned < 0 else returned
