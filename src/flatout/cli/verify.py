"""`flatout verify`: is a changed script equal to the one before, and faster?"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.console import Console

from flatout.errors import UsageError
from flatout.records.verdict import PRECISIONS

if TYPE_CHECKING:
    from flatout.verification.proof import Terms

_ALLOWED = ("exact", "bounded")


def verify(
    before: Annotated[
        Path, typer.Argument(help="The script as it was; or a plan (.toml) for the script that follows.")
    ],
    after: Annotated[Path, typer.Argument(help="The script as it is now.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[ARGS]...", help="Arguments of both scripts, after `--`.")
    ] = None,
    allow: Annotated[
        str, typer.Option(metavar="GUARANTEE", help="exact: the same bits. bounded: rounding no worse than before.")
    ] = "bounded",
    at: Annotated[
        str,
        typer.Option(
            "--at",
            metavar="PRECISION",
            help=f"Whose rounding counts: {', '.join(PRECISIONS)}. Else the script's, or the plan's.",
        ),
    ] = "",
    steps: Annotated[int, typer.Option(help="How many steps are compared.")] = 8,
    seconds: Annotated[float, typer.Option(help="How long to race the two, in all.")] = 15.0,
    timeout: Annotated[
        float, typer.Option(help="Seconds a process may take for its start or its first steps.")
    ] = 300.0,
    seed: Annotated[int, typer.Option(help="Moves all seeds that the scripts set.")] = 0,
    no_speed: Annotated[bool, typer.Option("--no-speed", help="Compare only, do not race.")] = False,
    no_equality: Annotated[
        bool, typer.Option("--no-equality", help="Race only; what is computed is not compared, and nothing proved.")
    ] = False,
    json: Annotated[Path | None, typer.Option("--json", help="Write the verdict to this file.")] = None,
) -> None:
    """Run both scripts step by step in processes of their own, compare losses, gradients and parameters, and race them.

    Exits with 0 when AFTER is proved equal and faster, with 1 when it is different or slower, with 2 when that cannot be told.
    """
    from flatout.records.record import to_json, write_file
    from flatout.reporting.verdict import verdict_report
    from flatout.session import environment_of, precision_of_plan, read_plan
    from flatout.session import verify as prove
    from flatout.verification.process import Request

    terms = _terms(allow, at, steps=steps, seconds=seconds, timeout=timeout, seed=seed, is_timed=not no_speed)
    terms = msgspec.structs.replace(terms, is_compared=not no_equality)
    if json is not None and not json.absolute().parent.is_dir():
        raise UsageError(
            f"--json {json}: there is no folder '{json.absolute().parent}'; give a path in one that exists"
        )
    own = tuple(arguments or ())
    own = own[1:] if own[:1] == ("--",) else own
    status = Console(stderr=True)
    for path in (before, after):
        if not path.is_file():
            raise UsageError(f"'{path}' is not a file; give two scripts that you would give to python")
    requests = [Request(target=str(path), arguments=own) for path in (before, after)]
    if before.suffix == ".toml":
        plan = read_plan(before)
        wanted = environment_of(plan)
        terms = msgspec.structs.replace(terms, at=at or precision_of_plan(plan))
        changed = Request(target=str(after), arguments=own, plan=str(before.absolute()), environment=wanted)
        requests = [Request(target=str(after), arguments=own), changed]
    with status.status("starting") as line:
        verdict = prove(requests[0], requests[1], terms, tell=line.update)
    Console().print(verdict_report(verdict))
    if json is not None:
        write_file(json, to_json(verdict))
    sys.stdout.flush()
    raise typer.Exit(verdict.exit_code)


def _terms(allow: str, at: str, *, steps: int, seconds: float, timeout: float, seed: int, is_timed: bool) -> Terms:
    from flatout.verification.proof import Terms as Wanted

    if allow not in _ALLOWED:
        raise UsageError(f"--allow {allow} is none of {', '.join(_ALLOWED)}")
    if at not in ("", *PRECISIONS):
        raise UsageError(f"--at {at} is none of {', '.join(PRECISIONS)}")
    if steps < 1:
        raise UsageError(f"--steps {steps} must be at least 1")
    if seconds <= 0 or timeout <= 0:
        raise UsageError(f"--seconds {seconds:g} and --timeout {timeout:g} must be above 0")
    return Wanted(
        guarantee="exact" if allow == "exact" else "bounded",
        num_steps=steps,
        budget_s=seconds,
        timeout_s=timeout,
        seed=seed,
        at=at,
        is_timed=is_timed,
    )
