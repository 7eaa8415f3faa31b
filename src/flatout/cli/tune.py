"""`flatout tune`: the fastest plan for a script that can be proved, without touching it."""

from __future__ import annotations

import hashlib
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.console import Console

from flatout.cli.machine import cache_folder
from flatout.errors import CaptureError, UsageError

if TYPE_CHECKING:
    from flatout.records.evidence import Evidence
    from flatout.verification.process import Request

_ALLOWED: Final = ("exact", "bounded")
_UNITS: Final = {"s": 1.0, "m": 60.0, "h": 3600.0}
_OBSERVED_FRACTION: Final = 0.1
_MOST_OBSERVED_S: Final = 20.0
_INTERRUPTED: Final = 130


def tune(
    script: Annotated[Path, typer.Argument(help="The script, as you would give it to python.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[ARGS]...", help="The script's own arguments, after `--`.")
    ] = None,
    budget: Annotated[str, typer.Option(help="How long to search: 300, 300s, 5m, 1h.")] = "5m",
    allow: Annotated[
        str, typer.Option(metavar="GUARANTEE", help="exact: the same bits. bounded: rounding no worse than before.")
    ] = "bounded",
    out: Annotated[Path, typer.Option("--out", help="Where the plan goes.")] = Path("plan.toml"),
    timeout: Annotated[
        float, typer.Option(help="Seconds one process may take for its start or its first steps.")
    ] = 300.0,
) -> None:
    """Observe SCRIPT, try what may make it faster, each in processes of its own, and write the plan that could be proved.

    Every lever is named, measured and proved equal; the plan runs with `flatout run --plan plan.toml SCRIPT`. Interrupted, the
    same command goes on where it was.
    """
    from flatout.planning.ledger import Ledger
    from flatout.records.plan import to_toml
    from flatout.records.record import write_file
    from flatout.reporting.ladder import ladder
    from flatout.session import tune_script
    from flatout.verification.process import Request as Wanted
    from flatout.verification.proof import Terms

    if not script.is_file():
        raise UsageError(f"'{script}' is not a file; give the script that you would give to python")
    if allow not in _ALLOWED:
        raise UsageError(f"--allow {allow} is none of {', '.join(_ALLOWED)}")
    if not out.absolute().parent.is_dir():
        raise UsageError(f"--out {out}: there is no folder '{out.absolute().parent}'; give a path in one that exists")
    budget_s = _seconds(budget)
    own = tuple(arguments or ())
    own = own[1:] if own[:1] == ("--",) else own
    request = Wanted(target=str(script), arguments=own)
    ledger_path = out.with_name(f".{out.stem}.{_fingerprint(script, own)}.ledger")
    console = Console(stderr=True)
    with _one_interrupt(), console.status("observing the script") as status:
        try:
            evidence = _observe(request, observe_s=min(_MOST_OBSERVED_S, _OBSERVED_FRACTION * budget_s))
            tuned = tune_script(
                request,
                evidence,
                terms=Terms(guarantee="exact" if allow == "exact" else "bounded", budget_s=6.0, timeout_s=timeout),
                budget_s=(1 - _OBSERVED_FRACTION) * budget_s,
                ledger=Ledger(ledger_path),
                tell=status.update,
            )
        except KeyboardInterrupt:
            console.print("interrupted; what was tried is kept, and the same command goes on from there")
            raise typer.Exit(_INTERRUPTED) from None
    Console().print(ladder(tuned.plan, tuned.proof, tuned.left_out, is_complete=tuned.is_complete))
    write_file(out, to_toml(tuned.plan))
    if tuned.is_complete:
        ledger_path.unlink(missing_ok=True)
    if tuned.plan.lever:
        rest = " ".join(("--", *own)) if own else ""
        Console().print(f"\nflatout run --plan {out} {script} {rest}".rstrip(), markup=False, highlight=False)


def _observe(request: Request, *, observe_s: float) -> Evidence:
    """What a run of the script shows, in a process of its own, which ends when enough was seen."""
    from flatout.records.evidence import Evidence as Seen
    from flatout.records.record import from_json, to_json, write_file
    from flatout.session import Observation

    with tempfile.TemporaryDirectory(prefix="flatout-") as name:
        folder = Path(name)
        observation = Observation(
            target=request.target,
            kind="script",
            arguments=request.arguments,
            command=("python", request.target, *request.arguments),
            evidence_path=str(folder / "evidence.json"),
            machine_path=str(cache_folder()),
            observe_s=observe_s,
            stop=True,
        )
        write_file(folder / "request.json", to_json(observation))
        with open(folder / "said", "wb") as said:
            command = [sys.executable, "-m", "flatout.cli.observe", str(folder / "request.json")]
            subprocess.run(command, stdout=said, stderr=subprocess.STDOUT, check=False)
        path = folder / "evidence.json"
        if not path.exists():
            words = (folder / "said").read_text(errors="replace").strip().splitlines()[-3:]
            raise CaptureError(f"'{request.target}' could not be observed: {' | '.join(words) or 'it printed nothing'}")
        return from_json(path.read_bytes(), Seen)


@contextmanager
def _one_interrupt() -> Iterator[None]:
    """The first Ctrl-C ends the search in order; those that follow wait until all processes are gone."""

    def interrupted(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, interrupted)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _fingerprint(script: Path, arguments: tuple[str, ...]) -> str:
    """Changes with the script's text and its arguments: what was tried for another script says nothing."""
    return hashlib.sha256(script.read_bytes() + repr(arguments).encode()).hexdigest()[:12]


def _seconds(text: str) -> float:
    """'5m' in seconds.

    >>> _seconds("5m")
    300.0
    """
    number, unit = (text[:-1], text[-1]) if text[-1:] in _UNITS else (text, "s")
    try:
        seconds = float(number) * _UNITS[unit]
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < float("inf"):
        raise UsageError(f"--budget {text} is no time above 0; write 300, 300s, 5m or 1h")
    return seconds
