"""`flatout check`: run a script as it is, and say where its step's time goes."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Final

import typer

from flatout.app.cli.command import Command
from flatout.app.cli.options import (
    Arguments,
    EvidenceJson,
    ModuleName,
    ReportHtml,
    ReportMarkdown,
    Script,
    StepTrace,
    require_folder_to_write,
    require_writable,
    target_of,
)
from flatout.app.cli.ranks import (
    Rank,
    all_written,
    bring,
    end_leftovers,
    evidence_path,
    exchange_of,
    failed_code,
    fetch,
    gather,
    launch_command,
    launch_environment,
    launched_rank,
    observing_ranks,
    shared_folder,
    wait_for_others,
)
from flatout.app.cli.terminal import open_console, print_report
from flatout.app.observation import observation_of, write_request
from flatout.app.observed import Ended, ObservedCommand, ObservedProcess
from flatout.app.outputs import Outputs
from flatout.core.errors import CaptureError, UsageError
from flatout.core.exit_codes import REFUSED_INPUT, UNDECIDED

if TYPE_CHECKING:
    from flatout.app.session import Observation
    from flatout.core.records.evidence import Evidence
    from flatout.core.records.finding import Diagnosis


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
    keep_running: Annotated[
        bool, typer.Option("--keep-running", help="Let the script go on when the report is ready, to its own end.")
    ] = False,
    no_trials: Annotated[
        bool,
        typer.Option(
            "--no-trials", help="Try nothing: gains are estimated from what was seen, sooner and less exactly."
        ),
    ] = False,
    stop: Annotated[bool, typer.Option("--stop", hidden=True)] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Show no progress line on the terminal.")] = False,
    nproc: Annotated[
        int | None,
        typer.Option(
            "--nproc", metavar="N", help="Start the script as this many ranks on this machine, like torchrun."
        ),
    ] = None,
    gather_in: Annotated[
        Path | None,
        typer.Option(
            "--gather",
            metavar="DIR",
            help="A folder that all hosts of a job see, through which rank 0 gets what others saw.",
        ),
    ] = None,
) -> None:
    """Run SCRIPT unchanged, observe its steps, and report what makes them slow: line, cost, gain, edit.

    The script runs as under python and prints what it prints. When enough has been observed it is ended with all that it has
    started, and the report is the last thing printed; `--keep-running` lets it go on undisturbed. Ctrl-C is the script's; a
    second one, SIGTERM and SIGHUP end it with a report of what there is.
    A notebook (.ipynb) runs as a script, cell by cell; what is no Python in it is left out, and named.
    Several ranks: `--nproc 2`, or your own launcher: `torchrun ... -m flatout.app.cli check SCRIPT`, or srun.
    Rank 0 reports them all.
    """
    example = "`flatout check train.py -- --its --arguments` or `flatout check -m package.module`"
    wanted = target_of(target, module, arguments, example=example)
    outputs = Outputs(json=json, html=html, markdown=markdown, trace=trace)
    require_writable(**outputs._asdict())
    if seconds <= 0:
        raise UsageError(f"--seconds {seconds} must be above 0")
    if nproc is not None and nproc < 1:
        raise UsageError(f"--nproc {nproc} must be at least 1")
    if stop:
        note = (
            "note: check ends the script by itself now, --stop is not needed and will go; --keep-running lets it go on"
        )
        open_console(stderr=True).print(note, style="dim")
    observation = observation_of(wanted, observe_s=seconds, stop=not keep_running, has_trials=not no_trials)
    launched = launched_rank(os.environ)
    if launched is not None:
        if nproc is not None:
            raise UsageError(f"--nproc {nproc} inside rank {launched.rank} of a launcher; give one of the two")
        raise typer.Exit(_run_as_rank(observation, launched, outputs, gather_in))
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
    process = ObservedProcess(
        ObservedCommand(
            command,
            is_complete=path.exists,
            stop=observation.stop,
            print_now=lambda: _print_now(_read(path), outputs),
            progress=progress,
            output=_for_script(outputs),
        )
    )
    ended = process.wait()
    evidence = _written(path, ended)
    if evidence is None:
        if ended.code == REFUSED:
            return REFUSED_INPUT
        raise CaptureError(
            f"the script ended with code {ended.code} before anything could be written (killed, or os._exit)"
        )
    if evidence.exit == "stopped":
        process.end_rest()
    return _report(evidence, outputs, ended)


def _for_script(outputs: Outputs) -> IO[bytes] | None:
    """Where the script's output goes where a file takes standard output; None: where ours goes."""
    return sys.stderr.buffer if outputs.take_stdout else None


def _run_ranks(observation: Observation, folder: Path, nproc: int, outputs: Outputs) -> int:
    """Start `nproc` observed ranks under torch's launcher, wait for them, print one report; the launcher's exit code."""
    request = folder / "observation.json"
    write_request(observation, request, evidence_path=folder, world_size=nproc)
    process = ObservedProcess(
        ObservedCommand(
            launch_command(nproc, request),
            is_complete=lambda: all_written(folder, range(nproc)),
            stop=observation.stop,
            has_peers=True,
            ranks=lambda: observing_ranks(folder, nproc),
            print_now=lambda: _print_now(gather(folder, nproc), outputs),
            output=_for_script(outputs),
            environment=launch_environment(os.environ, nproc),
        )
    )
    ended = process.wait()
    end_leftovers(folder, nproc)
    if ended.code and not any(folder.glob("rank*.json")) and not any(folder.glob("rank*.draft")):
        return ended.code  # the ranks and their launcher have said why
    evidence = gather(folder, nproc)
    return _report(evidence, outputs, ended._replace(code=ended.code or failed_code(evidence)))


def _run_as_rank(observation: Observation, rank: Rank, outputs: Outputs, gather_in: Path | None) -> int:
    """Observe the one rank that a launcher made this process; rank 0 reports all ranks, the others are silent."""
    if gather_in is not None:
        require_folder_to_write("--gather", gather_in)
        gather_in.mkdir(exist_ok=True)
    folder = shared_folder(os.environ, rank)
    request = folder / f"observation{rank.rank}.json"
    command = write_request(observation, request, evidence_path=folder, world_size=rank.world_size)
    local = range(rank.rank - rank.rank % rank.local_world_size, rank.world_size)[: rank.local_world_size]
    print_now = (lambda: _print_now(gather(folder, rank.world_size), outputs)) if rank.rank == 0 else None
    ended = ObservedProcess(
        ObservedCommand(
            command,
            is_complete=lambda: all_written(folder, local),
            stop=observation.stop,
            has_peers=True,
            print_now=print_now,
            output=_for_script(outputs),
        )
    ).wait()
    own = evidence_path(folder, rank.rank)
    code = ended.code
    if code == REFUSED and not own.exists():
        return REFUSED_INPUT
    exchange = exchange_of(os.environ, rank, gather_in)
    if rank.rank == 0:
        wait_for_others(folder, local)
        if exchange is not None:
            fetch(exchange, folder, (other for other in range(rank.world_size) if other not in local))
            exchange.close()
        code = _report(gather(folder, rank.world_size), outputs, ended)
        shutil.rmtree(folder, ignore_errors=True)
    elif exchange is not None and (0 in local or bring(exchange, folder, rank.rank)):
        pass  # rank 0 has it
    elif outputs.json is not None and rank.local_world_size < rank.world_size:
        from flatout.core.files import write_whole_file

        # Rank 0 does not get what this host saw: `flatout report` merges the files, and waiting needs each rank's own calls.
        with suppress(FileNotFoundError):  # it left none, or rank 0 has reported it and was done first
            write_whole_file(outputs.json.with_suffix(f".rank{rank.rank}.json"), own.read_bytes())
    return code


REFUSED: Final = 78
"""Exit code of the observed process when it has said itself why it could not start (EX_CONFIG)."""


def _written(path: Path, ended: Ended) -> Evidence | None:
    """What the process has written: all of it, what there was until its close looks where it was killed later, or nothing."""
    import msgspec

    from flatout.app.session import draft_path, ended_by

    draft = draft_path(path)
    if path.exists():
        evidence = _read(path)
    elif draft.exists():
        evidence = _read(draft)
        note = "the script was killed: what it had shown until its close looks is all there is of it"
        evidence = msgspec.structs.replace(evidence, exit="killed", exit_code=ended.code, notes=(*evidence.notes, note))
    else:
        return None
    if ended.is_by_us:
        return msgspec.structs.replace(evidence, exit="stopped", exit_code=0)
    if ended.signal and evidence.exit_code != 128 + ended.signal:
        return msgspec.structs.replace(evidence, exit=ended_by(ended.signal), exit_code=ended.code)
    return evidence


def _read(path: Path) -> Evidence:
    from flatout.report.json_report import read_evidence

    return read_evidence(path.read_bytes())


def _print_now(evidence: Evidence, outputs: Outputs) -> None:
    """Print the report of a script that goes on."""
    _print(evidence, _diagnosis_of(evidence), stderr=outputs.take_stdout)
    open_console(stderr=True).print("the script goes on, no longer observed; Ctrl-C ends it", style="dim")


def _report(evidence: Evidence, outputs: Outputs, ended: Ended) -> int:
    """Write the files and print the report, last of all; the exit code."""
    diagnosis = _diagnosis_of(evidence)
    try:
        outputs.write(evidence, diagnosis)  # first: the terminal may be gone
    finally:
        if not ended.was_printed:
            _print(evidence, diagnosis, stderr=outputs.take_stdout)
    return ended.code if ended.code or evidence.steps.num_timed else UNDECIDED


def _diagnosis_of(evidence: Evidence) -> Diagnosis:
    from flatout.app.session import diagnose_all

    return diagnose_all(evidence)


def _print(evidence: Evidence, diagnosis: Diagnosis, *, stderr: bool) -> None:
    from flatout.report.parts.diagnosis import diagnosis_blocks

    with suppress(OSError):  # a terminal that has hung up
        print_report(["", *diagnosis_blocks(evidence, diagnosis)], stderr=stderr)


COMMAND = Command(
    check,
    order=10,
    group="find",
    takes_script=True,
    examples=("flatout check train.py -- --epochs 1", "flatout check --html report.html -m package.train -- --lr 0.1"),
)
