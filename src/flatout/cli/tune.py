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

from flatout.cli.durations import seconds_of
from flatout.cli.machine import cache_folder
from flatout.errors import CaptureError, UsageError

if TYPE_CHECKING:
    from flatout.records.evidence import Evidence
    from flatout.records.tuned import Tuned
    from flatout.records.verdict import Guarantee
    from flatout.verification.process import Request

_ALLOWED: Final = ("exact", "bounded")
_RACE_S: Final = 6.0
_DECISIVE: Final = 1.3
"""Two processes of one script rarely differ by more (bench/results): a lever beyond that needs no second pair to be judged."""
_OBJECTIVES: Final = ("time", "memory")
_SIZES: Final = {
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
}
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
    metric: Annotated[
        str,
        typer.Option(
            metavar="PATTERN",
            help="What the script prints of its quality, as 'accuracy ([0-9.]+)': allows levers that change results.",
        ),
    ] = "",
    allowed_loss: Annotated[float, typer.Option(help="How much of the metric a plan may lose.")] = 0.0,
    less_is_better: Annotated[bool, typer.Option("--less-is-better", help="The metric is a loss or an error.")] = False,
    objective: Annotated[str, typer.Option(metavar="time|memory", help="What is to become less.")] = "time",
    memory: Annotated[
        str,
        typer.Option(
            metavar="SIZE", help="What a step may hold at most, of the device or else the process: 20GiB, 800MiB."
        ),
    ] = "",
    out: Annotated[Path, typer.Option("--out", help="Where the plan goes.")] = Path("plan.toml"),
    html: Annotated[Path | None, typer.Option("--html", help="Write what was found to this file, as a page.")] = None,
    markdown: Annotated[Path | None, typer.Option("--md", help="Write it to this file as Markdown.")] = None,
    json: Annotated[Path | None, typer.Option("--json", help="Write it to this file as JSON.")] = None,
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
    from flatout.verification.quality import Metric, checked

    if not script.is_file():
        raise UsageError(f"'{script}' is not a file; give the script that you would give to python")
    if allow not in _ALLOWED:
        raise UsageError(f"--allow {allow} is none of {', '.join(_ALLOWED)}")
    for option, path in (("out", out), ("html", html), ("md", markdown), ("json", json)):
        if path is not None and not path.absolute().parent.is_dir():
            raise UsageError(
                f"--{option} {path}: there is no folder '{path.absolute().parent}'; give a path in one that exists"
            )
    if objective not in _OBJECTIVES:
        raise UsageError(f"--objective {objective} is none of {', '.join(_OBJECTIVES)}")
    budget_s, most_bytes = seconds_of(budget, name="--budget"), _bytes(memory)
    quality = None
    if metric:
        quality = checked(Metric(pattern=metric, allowed_loss=allowed_loss, is_cost=less_is_better))
    allowed: Guarantee = "quality" if metric else "exact" if allow == "exact" else "bounded"
    own = tuple(arguments or ())
    own = own[1:] if own[:1] == ("--",) else own
    request = Wanted(target=str(script), arguments=own)
    aims = (allow, objective, memory, metric, str(allowed_loss), str(less_is_better))
    console = Console(stderr=True)
    with _one_interrupt(), console.status("observing the script") as status:
        try:
            evidence = _observe(request, observe_s=min(_MOST_OBSERVED_S, _OBSERVED_FRACTION * budget_s))
            ledger_path = out.with_name(f".{out.stem}.{_fingerprint(evidence, script, own, aims)}.ledger")
            tuned = tune_script(
                request,
                evidence,
                terms=Terms(
                    guarantee="exact" if allow == "exact" else "bounded",
                    budget_s=_RACE_S,
                    timeout_s=timeout,
                    decisive=_DECISIVE,
                    metric=quality,
                ),
                allow=allowed,
                budget_s=(1 - _OBSERVED_FRACTION) * budget_s,
                ledger=Ledger(ledger_path),
                objective="memory" if objective == "memory" else "time",
                most_bytes=most_bytes,
                tell=status.update,
            )
        except KeyboardInterrupt:
            console.print("interrupted; what was tried is kept, and the same command goes on from there")
            raise typer.Exit(_INTERRUPTED) from None
    Console().print(ladder(tuned))
    write_file(out, to_toml(tuned.plan))
    _write(tuned, html=html, markdown=markdown, json=json)
    if tuned.is_complete:
        ledger_path.unlink(missing_ok=True)
    if tuned.plan.lever:
        rest = " ".join(("--", *own)) if own else ""
        Console().print(f"\nflatout run --plan {out} {script} {rest}".rstrip(), markup=False, highlight=False)


def _write(tuned: Tuned, *, html: Path | None, markdown: Path | None, json: Path | None) -> None:
    """The files that were asked for, each whole or not at all."""
    from flatout.records.record import to_json, write_file

    if html is not None:
        from flatout.reporting.html import ladder_html

        write_file(html, ladder_html(tuned))
    if markdown is not None:
        from flatout.reporting.ladder_markdown import ladder_markdown

        write_file(markdown, ladder_markdown(tuned).encode())
    if json is not None:
        write_file(json, to_json(tuned))


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
    """The first Ctrl-C ends the search in order; those that follow change nothing, until this process has ended too."""

    def interrupted(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, interrupted)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is interrupted:
            signal.signal(signal.SIGINT, before)


def _fingerprint(evidence: Evidence, script: Path, arguments: tuple[str, ...], wanted: tuple[str, ...]) -> str:
    """Changes with what a trial depends on: the text of the script and of those of its files that steps ran through, its
    arguments, the device and torch, and what a plan is for."""
    root, workload = script.resolve().parent, evidence.workload
    files = {Path(s.file).resolve() for s in evidence.sources} | {script.resolve()}
    found = hashlib.sha256(repr((arguments, wanted, workload.device, workload.torch)).encode())
    for path in sorted(files):
        if path.is_relative_to(root) and path.is_file():
            found.update(path.read_bytes())
    return found.hexdigest()[:12]


def _bytes(text: str) -> int:
    """'20GiB' in bytes; 0 for nothing.

    >>> _bytes("20GiB") == 20 * 2**30
    True
    """
    if not text:
        return 0
    unit = next((u for u in _SIZES if text.endswith(u)), "")
    try:
        size = float(text.removesuffix(unit)) * _SIZES[unit]
    except (KeyError, ValueError):
        size = -1.0
    if not 0 < size < float("inf"):
        raise UsageError(f"--memory {text} is no size above 0; write 20GiB, 800MiB or 20GB")
    return int(size)
