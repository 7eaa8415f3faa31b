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
from typing import TYPE_CHECKING, Annotated, Final, NamedTuple

import typer

from flatout.app.cli.command import Command
from flatout.app.cli.options import (
    Arguments,
    EvidenceJson,
    ModuleName,
    Outputs,
    ReportHtml,
    ReportMarkdown,
    Script,
    ScriptTarget,
    StepTrace,
    require_folders,
    target_of,
)
from flatout.app.cli.ranks import (
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
from flatout.app.cli.terminal import open_console, print_report
from flatout.core.errors import CaptureError, UsageError
from flatout.core.runtime.cache_folder import default_cache_folder

if TYPE_CHECKING:
    from flatout.app.cli.progress import StatusLine
    from flatout.app.session import Observation
    from flatout.core.records.evidence import Evidence

_POLL_S: Final = 0.2
_PATIENCE_S: Final = 5.0
"""A script that ends this soon after the observation gets its report at the end; under a longer one it is printed at once."""


def check(
    context: typer.Context,
    target: Script = None,
    arguments: Arguments = None,
    module: ModuleName = None,
    json: EvidenceJson = None,
    html: ReportHtml = None,
    markdown: ReportMarkdown = None,
    trace: StepTrace = None,
    seconds: Annotated[float, typer.Option(help="How long to observe steps, besides the few deep ones.")] = 30.0,
    stop: Annotated[bool, typer.Option("--stop", help="End the script when the observation is complete.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Show no progress line on the terminal.")] = False,
    nproc: Annotated[
        int | None, typer.Option("--nproc", help="Start the script as this many ranks on this machine, like torchrun.")
    ] = None,
) -> None:
    """Run SCRIPT unchanged, observe its steps, and report what makes them slow: line, cost, gain, edit.

    The script runs as under python, prints what it prints, and goes on undisturbed when enough has been observed.
    Several ranks: `--nproc 2`, or your own launcher: `torchrun ... -m flatout.app.cli check SCRIPT`; rank 0 reports them all.
    """
    example = "`flatout check train.py -- --its --arguments` or `flatout check -m package.module`"
    wanted = target_of(target, module, arguments, example=example)
    outputs = Outputs(json=json, html=html, markdown=markdown, trace=trace)
    require_folders(**outputs._asdict())
    if seconds <= 0:
        raise UsageError(f"--seconds {seconds} must be above 0")
    if nproc is not None and nproc < 1:
        raise UsageError(f"--nproc {nproc} must be at least 1")
    observation = observation_of(wanted, observe_s=seconds, stop=stop)
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
    import msgspec

    path = folder / "evidence.json"
    progress = None if is_quiet or not sys.stderr.isatty() else folder / "progress.json"
    observation = msgspec.structs.replace(observation, progress_path=str(progress) if progress is not None else "")
    command = write_request(observation, folder / "observation.json", evidence_path=path)
    code, was_printed = _Observed(command, path.exists, lambda: _read(path), observation.stop, progress).wait()
    if not path.exists():
        if code == _REFUSED:
            return 2
        raise CaptureError(f"the script ended with code {code} before anything could be written (killed, or os._exit)")
    return _print_report(_read(path), outputs, code, print_it=not was_printed)


def _run_ranks(observation: Observation, folder: Path, nproc: int, outputs: Outputs) -> int:
    """Start `nproc` observed ranks under torch's launcher, wait for them, print one report; the launcher's exit code."""
    request = folder / "observation.json"
    write_request(observation, request, evidence_path=folder, world_size=nproc)
    command = launch_command(nproc, request)
    ranks = _Observed(
        command, lambda: all_written(folder, range(nproc)), lambda: gather(folder, nproc), observation.stop
    )
    code, was_printed = ranks.wait()
    end_leftovers(folder, nproc)
    if code and not any(folder.glob("rank*.json")) and not any(folder.glob("rank*.draft")):
        return code  # the ranks and their launcher have said why
    return _print_report(gather(folder, nproc), outputs, code, print_it=not was_printed)


def _run_as_rank(observation: Observation, rank: Rank, outputs: Outputs) -> int:
    """Observe the one rank that a launcher made this process; rank 0 reports all ranks of its host, the others are silent."""
    folder = shared_folder(os.environ, rank)
    request = folder / f"observation{rank.rank}.json"
    command = write_request(observation, request, evidence_path=folder, world_size=rank.world_size)
    local = range(rank.rank - rank.rank % rank.local_world_size, rank.world_size)[: rank.local_world_size]
    gathered = (lambda: gather(folder, rank.world_size)) if rank.rank == 0 else None
    code, was_printed = _Observed(command, lambda: all_written(folder, local), gathered, observation.stop).wait()
    own = evidence_path(folder, rank.rank)
    if code == _REFUSED and not own.exists():
        return 2
    if rank.rank == 0:
        wait_for_others(folder, local)
        code = _print_report(gather(folder, rank.world_size), outputs, code, print_it=not was_printed)
        shutil.rmtree(folder, ignore_errors=True)
    elif outputs.json is not None and rank.host_number and own.exists():
        from flatout.core.records.record import write_whole_file

        # Rank 0 runs on another host and cannot see this file: `flatout report` merges what each host wrote.
        write_whole_file(outputs.json.with_suffix(f".rank{rank.rank}.json"), own.read_bytes())
    return code


def observation_of(target: ScriptTarget, *, observe_s: float, stop: bool) -> Observation:
    """The request to observe a script in a process of its own; `write_request` adds where its Evidence goes."""
    from flatout.app.session import Observation

    return Observation(
        target=target.name,
        kind=target.kind,
        arguments=target.arguments,
        command=("python", *(("-m",) if target.is_module else ()), target.name, *target.arguments),
        evidence_path="",
        machine_path=str(default_cache_folder()),
        observe_s=observe_s,
        stop=stop,
    )


def write_request(observation: Observation, request: Path, *, evidence_path: Path, world_size: int = 1) -> list[str]:
    """Write the request; the command that follows it."""
    import msgspec

    from flatout.core.records.record import to_json, write_whole_file

    full = msgspec.structs.replace(observation, evidence_path=str(evidence_path), world_size=world_size)
    write_whole_file(request, to_json(full))
    return [sys.executable, "-m", "flatout.app.cli.children.observe", str(request)]


_REFUSED: Final = 78
"""Exit code of the observed process when it has said itself why it could not start (EX_CONFIG)."""


class _Observed(NamedTuple):
    """A process under observation, or the launcher of several."""

    command: list[str]
    is_complete: Callable[[], bool]
    evidence: Callable[[], Evidence] | None
    """What there is to report; None where another rank reports it."""
    stop: bool
    progress: Path | None = None
    """The file that says how far it has come, for the terminal."""

    def wait(self) -> tuple[int, bool]:
        """Run the command to its end: (its exit code, whether the report was printed while it went on).

        With `stop` an observed process ends itself when it is alone; one that swallows that, and ranks, are ended from here.
        """
        from flatout.app.cli.progress import StatusLine

        child = subprocess.Popen(self.command)
        previous = signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal tells the script too; it decides
        terminate = signal.signal(signal.SIGTERM, lambda *_: child.terminate())
        try:
            with StatusLine(self.progress or Path(), sys.stderr, is_wanted=self.progress is not None) as status:
                return self._ended(child, status)
        finally:
            signal.signal(signal.SIGINT, previous)
            signal.signal(signal.SIGTERM, terminate)

    def _ended(self, child: subprocess.Popen[bytes], status: StatusLine) -> tuple[int, bool]:
        complete_at: float | None = None
        was_printed = False
        while True:
            try:
                code = child.wait(timeout=_POLL_S)
                return (128 - code if code < 0 else code), was_printed  # the shell's convention for a signal
            except subprocess.TimeoutExpired:
                status.update()
            if complete_at is None and self.is_complete():
                complete_at = monotonic()
                status.close()
            if complete_at is None or monotonic() - complete_at <= _PATIENCE_S:
                continue
            if self.stop:
                _end(child)
                return 0, False
            if not was_printed and self.evidence is not None:
                _print_report(self.evidence(), Outputs(), 0, print_it=True)
                open_console(stderr=True).print("the script goes on, no longer observed; Ctrl-C ends it", style="dim")
            was_printed = True


def _end(child: subprocess.Popen[bytes]) -> None:
    """End a process that has been observed enough: politely, so that a launcher ends its ranks too, then for good."""
    child.terminate()
    try:
        child.wait(timeout=_PATIENCE_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def _read(path: Path) -> Evidence:
    from flatout.report.json_report import read_evidence

    return read_evidence(path.read_bytes())


def _print_report(evidence: Evidence, outputs: Outputs, code: int, *, print_it: bool) -> int:
    from flatout.app.session import diagnose_all
    from flatout.report.parts.diagnosis import diagnosis_blocks

    diagnosis = diagnose_all(evidence)
    if print_it:
        print_report(["", *diagnosis_blocks(evidence, diagnosis)])
    outputs.write(evidence, diagnosis)
    return code if code or evidence.steps.num_timed else 1


COMMAND = Command(check, order=10, takes_script=True)
