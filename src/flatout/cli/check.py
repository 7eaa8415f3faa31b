"""`flatout check`: run a script as it is, and say where its step's time goes."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from time import monotonic
from typing import Annotated, Final

import typer
from rich.console import Console

from flatout.cli.machine import cache_folder
from flatout.cli.outputs import Outputs
from flatout.cli.progress import StatusLine
from flatout.errors import CaptureError, UsageError
from flatout.records.record import to_json, write_file

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
) -> None:
    """Run SCRIPT unchanged, observe its steps, and report what makes them slow: line, cost, gain, edit.

    The script runs as under python, prints what it prints, and goes on undisturbed when enough has been seen.
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
    with tempfile.TemporaryDirectory(prefix="flatout-") as folder:
        observation = Observation(
            target=name,
            kind="module" if module is not None else "script",
            arguments=tuple(own),
            command=("python", *(("-m",) if module is not None else ()), name, *own),
            evidence_path=str(Path(folder) / "evidence.json"),
            progress_path="" if quiet or not sys.stderr.isatty() else str(Path(folder) / "progress.json"),
            machine_path=str(cache_folder()),
            observe_s=seconds,
            stop=stop,
        )
        raise typer.Exit(_run(observation, Path(folder), outputs))


def _run(observation: object, folder: Path, outputs: Outputs) -> int:
    """Start the observed process, wait for it, print the report; its exit code."""
    from flatout.records.record import Record
    from flatout.session import Observation

    assert isinstance(observation, Observation) and isinstance(observation, Record)
    request = folder / "observation.json"
    write_file(request, to_json(observation))
    notes = Console(stderr=True)
    child = subprocess.Popen([sys.executable, "-m", "flatout.cli.observe", str(request)])
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal tells the script too; it decides
    terminate = signal.signal(signal.SIGTERM, lambda *_: child.terminate())
    try:
        with StatusLine(
            Path(observation.progress_path), sys.stderr, is_wanted=bool(observation.progress_path)
        ) as status:
            code, told = _wait(child, Path(observation.evidence_path), notes, status, stop=observation.stop)
    finally:
        signal.signal(signal.SIGINT, previous)
        signal.signal(signal.SIGTERM, terminate)
    path = Path(observation.evidence_path)
    if not path.exists():
        if code == _REFUSED:
            return 2
        raise CaptureError(f"the script ended with code {code} before anything could be written (killed, or os._exit)")
    return _tell(path, outputs, code, print_it=not told)


_REFUSED: Final = 78
"""Exit code of the observed process when it has said itself why it could not start (EX_CONFIG)."""


def _wait(
    child: subprocess.Popen[bytes], path: Path, notes: Console, status: StatusLine, *, stop: bool
) -> tuple[int, bool]:
    """(exit code, whether the report was printed while the script went on).

    With `stop` the observed process ends itself; one that swallows that is ended from here.
    """
    complete_at: float | None = None
    told = False
    while True:
        try:
            return _code(child.wait(timeout=_POLL_S)), told
        except subprocess.TimeoutExpired:
            status.update()
        if complete_at is None and path.exists():
            complete_at = monotonic()
            status.close()
        if complete_at is not None and stop and monotonic() - complete_at > _PATIENCE_S:
            child.kill()
            child.wait()
            return 0, False
        if complete_at is not None and not told and monotonic() - complete_at > _PATIENCE_S:
            told = True
            _tell(path, Outputs(), 0, print_it=True)
            notes.print("the script goes on, no longer observed; Ctrl-C ends it", style="dim")


def _tell(path: Path, outputs: Outputs, code: int, *, print_it: bool) -> int:
    from flatout.reporting.json_report import read_evidence
    from flatout.reporting.text import report
    from flatout.session import diagnose_all

    evidence = read_evidence(path.read_bytes())
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
