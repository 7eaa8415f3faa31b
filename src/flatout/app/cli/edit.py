"""`flatout edit`: a plan as the change that a person would make in the script."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from flatout.app.cli.command import Command
from flatout.app.cli.options import ModuleName, Script, require_folder_to_write, require_writable, target_of
from flatout.app.cli.terminal import open_console, print_lines
from flatout.app.targets import ScriptTarget
from flatout.core.errors import FlatoutError, UsageError
from flatout.core.exit_codes import DONE, NEGATIVE, PARTLY_DONE, UNDECIDED
from flatout.core.files import STANDARD_OUTPUT
from flatout.core.secrets import has_left_out

if TYPE_CHECKING:
    from flatout.core.records.verdict import Guarantee, Verdict
    from flatout.tune.edits import Edits

_RACE_S: Final = 6.0
_AS_FAST_AS_PLAN: Final = 0.9
"""A text and its plan compute the same: a short race has some percent of noise, and only more than that is slower."""


def edit(
    script: Script = None,
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[ARGS]...", help="The script's own arguments, after `--`; else those of the plan."),
    ] = None,
    module: ModuleName = None,
    plan: Annotated[
        Path | None, typer.Option("--plan", metavar="FILE", help="The plan that `flatout tune` wrote.")
    ] = None,
    write: Annotated[bool, typer.Option("--write", help="Change the files in place.")] = False,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="DIR", help="Write the changed files into this folder.")
    ] = None,
    rest: Annotated[
        Path | None, typer.Option("--rest", metavar="FILE", help="Write the plan of the levers that stay in the plan.")
    ] = None,
    no_verify: Annotated[
        bool, typer.Option("--no-verify", help="Print the change at once, without running it beside the script.")
    ] = False,
    timeout: Annotated[
        float, typer.Option(help="Seconds one process may take for its start or its first steps.")
    ] = 300.0,
) -> None:
    """Print the plan as a diff of SCRIPT and the files it imports, once the changed text is proved to do the same.

    `patch -p1` takes it in the script's folder, or in the project's where a file of that lies outside. The changed text runs
    beside the script first, step by step, and only what is equal is printed. Exits with 0 when the text then holds all of the
    plan, with 4 when levers stay in the plan, which are named with the reason, with 1 (and no diff) when the text does something
    else than the script, and with 3 when that could not be verified, as the first line says.
    """
    from flatout.app.plans import read_plan
    from flatout.core.files import write_whole_file
    from flatout.core.records.plan import text_root, to_toml
    from flatout.tune.edits import edits

    if plan is None:
        raise UsageError("no plan given; call `flatout edit --plan plan.toml train.py`")
    target = target_of(script, module, arguments, example="`flatout edit --plan plan.toml train.py`")
    file = target.file
    if write and out is not None:
        raise UsageError("--write changes the files in place and --out writes copies; give one of them")
    if rest == STANDARD_OUTPUT:
        raise UsageError("--rest -: the diff goes to standard output; give a path")
    require_writable(rest=rest)
    if out is not None:
        require_folder_to_write("--out", out)
    wanted = read_plan(plan)
    if not target.arguments and has_left_out(wanted.arguments):
        raise UsageError(
            f"the plan's arguments are {shlex.join(wanted.arguments)}, without what looks like a credential; give the "
            "script's own arguments after `--`"
        )
    target = target._replace(arguments=target.arguments or wanted.arguments)
    root = Path(text_root(wanted, file.absolute()))
    found = edits(wanted, file, root=root)
    doubt = "not asked for" if no_verify else ""
    is_changed = bool(found.files or found.environment)
    if is_changed and not no_verify:
        doubt = _verified(found, target, plan, timeout_s=timeout)
    written = found.write(out) if write or out is not None else ()
    if is_changed and doubt:
        print(f"# NOT VERIFIED: {doubt}")
    sys.stdout.write(found.diff())
    sys.stdout.flush()
    # on stderr, so that stdout is the diff alone
    if found.files and found.folder != root:
        print_lines(f"files are named from '{found.folder}': `patch -p1` there takes the diff", stderr=True)
    print_lines(*(f"wrote {path}" for path in written), stderr=True)
    if found.environment:
        variables = " ".join(f"{name}={shlex.quote(value)}" for name, value in found.environment.items())
        words = ["python", *(("-m",) if target.is_module else ()), target.name, *target.arguments]
        print_lines(f"start it as: {variables} {shlex.join(words)}", stderr=True)
    print_lines(*(f"{one.id} stays in the plan: {because}" for one, because in found.stayed), stderr=True)
    if rest is not None:
        write_whole_file(rest, to_toml(found.rest))
    if doubt and not no_verify:
        raise typer.Exit(UNDECIDED)
    raise typer.Exit(PARTLY_DONE if found.stayed else DONE)


def _verified(found: Edits, target: ScriptTarget, plan: Path, *, timeout_s: float) -> str:
    """Run the changed text beside the script; why it could not be told whether they are equal, '' where they are.

    The text of a plan that costs precision runs beside the script with that plan: what it costs was judged with the plan.
    Exits with 1 where the text does something else, in two runs: what a script computes may differ from run to run.
    """
    import msgspec

    from flatout.app.plans import environment_of, precision_of_plan
    from flatout.tune.verify.proof import prove_script
    from flatout.tune.verify.proof_terms import ProofTerms
    from flatout.tune.verify.side_process import Request

    is_quality = found.plan.guarantee == "quality"
    if is_quality and found.stayed:
        return "the plan costs precision, and the text has not all of it; compare whole runs"
    guarantee: Guarantee = "distribution" if found.plan.guarantee == "distribution" else "bounded"
    terms = ProofTerms(
        guarantee=guarantee,
        at=precision_of_plan(found.plan),
        budget_s=_RACE_S,
        num_processes=1,
        timeout_s=timeout_s,
    )
    base = Request(target=target.name, kind=target.kind, arguments=target.arguments)
    changed = found.changed(base)
    if is_quality:
        base = msgspec.structs.replace(base, plan=str(plan.absolute()), environment=environment_of(found.plan))
    with open_console(stderr=True).status("running the changed text beside the script") as line:
        try:
            verdict = prove_script(base, changed, terms, on_progress=line.update)
            again = prove_script(base, changed, terms) if verdict.outcome == "different" else None
        except FlatoutError as e:
            return str(e)
    return _doubt(verdict, again, slow=_AS_FAST_AS_PLAN if is_quality else 1.0)


def _doubt(verdict: Verdict, again: Verdict | None, *, slow: float) -> str:
    """Why it is not known whether the text is equal and no slower.

    `again` is a second proof where the first said different; `slow` the ratio of speeds below which a text is slower.
    """
    from flatout.report.parts.verdict import deviation_words, verdict_headline

    headline = verdict_headline(verdict)
    if again is not None:
        what = f"{headline} ({deviation_words(verdict.equality)})"
        if again.outcome != "different":
            return f"one of two runs was not like the script: {what}; the other: {verdict_headline(again)}"
        print_lines(
            f"the change does something else than the script, so it is not printed: {what}; run the plan with "
            "`flatout run` and please report this",
            stderr=True,
        )
        raise typer.Exit(NEGATIVE)
    if verdict.equality.holds is None:
        return verdict.because
    if verdict.outcome == "slower" and (verdict.speed is None or verdict.speed.high < slow):
        return f"equal, but slower here: {headline}"
    because = verdict.because
    if verdict.outcome == "slower" and verdict.speed is not None:
        because = f"equal, at {verdict.speed.ratio:.2f}x the plan's speed in a short race"
    print_lines(f"verified: {headline if verdict.outcome == 'proved' else because}", stderr=True)
    return ""


COMMAND = Command(
    edit,
    order=170,
    group="fix",
    takes_script=True,
    examples=("flatout edit --plan plan.toml train.py", "flatout edit --plan plan.toml --write train.py"),
)
