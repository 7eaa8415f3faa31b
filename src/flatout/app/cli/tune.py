"""`flatout tune`: the fastest plan for a script that can be proved, without touching it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flatout.app.cli.command import Command
from flatout.app.cli.options import Allow, Arguments, ModuleName, Script, require_writable, target_of
from flatout.app.cli.terminal import open_console, print_lines, print_report
from flatout.core.files import STANDARD_OUTPUT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flatout.app.targets import ScriptTarget
    from flatout.core.records.plan import Tuned


def tune(
    script: Script = None,
    arguments: Arguments = None,
    module: ModuleName = None,
    budget: Annotated[
        str, typer.Option("--time-budget", metavar="TIME", help="How long to search: 300, 300s, 5m, 1h.")
    ] = "5m",
    allow: Allow = "bounded",
    metric: Annotated[
        str,
        typer.Option(
            metavar="PATTERN",
            help="What the script prints of its quality, as 'accuracy ([0-9.]+)': allows levers that change results.",
        ),
    ] = "",
    allowed_loss: Annotated[
        str,
        typer.Option(
            "--accuracy-loss",
            metavar="LOSS",
            help="What of the metric a plan may lose, or how much higher the loss may be: '1%' of it, or '0.01'.",
        ),
    ] = "0",
    less_is_better: Annotated[bool, typer.Option("--less-is-better", help="The metric is a loss or an error.")] = False,
    objective: Annotated[str, typer.Option(metavar="time|memory", help="What is to become less.")] = "time",
    memory: Annotated[
        str,
        typer.Option(
            "--memory-limit",
            metavar="SIZE",
            help="What a step may hold at most, of the device or else the process: 20GiB, 800MiB.",
        ),
    ] = "",
    run_steps: Annotated[
        int,
        typer.Option(
            min=0,
            help="Steps of the runs that the plan is for: what gains no whole run of them, start and compiling included, is "
            "left out; 0: as many as the script has, where it comes to its end.",
        ),
    ] = 0,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="Write the plan to this file.")] = Path(
        "plan.toml"
    ),
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write what was found to this file, as a page.")
    ] = None,
    markdown: Annotated[
        Path | None, typer.Option("--markdown", metavar="FILE", help="Write it to this file as Markdown.")
    ] = None,
    json: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write it to this file as JSON.")] = None,
    timeout: Annotated[
        float, typer.Option(help="Seconds one process may take for its start or its first steps.")
    ] = 300.0,
    workers: Annotated[
        str,
        typer.Option(
            metavar="KIND:N",
            help="Have what is tried compared ahead, on so many machines like this one: slurm:4 (a job array), ray:4.",
        ),
    ] = "",
    worker_options: Annotated[
        list[str] | None,
        typer.Option(
            "--worker-option",
            metavar="OPTION",
            help="An option of sbatch, as --worker-option=--gres=gpu:1, or for Ray num_gpus=1; may be given again.",
        ),
    ] = None,
) -> None:
    """Observe SCRIPT, try what may make it faster, each in processes of its own, and write the plan that could be proved.

    Every lever is named, measured and proved equal; the plan runs with `flatout run --plan plan.toml SCRIPT`. Interrupted, the
    same command goes on where it was.
    """
    from flatout.app.tune_script import ScriptEnded, SearchStopped, TuneOptions, search_plan
    from flatout.report.parts.ladder import WIDTH, ladder_blocks

    target = target_of(script, module, arguments, example="`flatout tune train.py -- --its --arguments`")
    require_writable(out=out, html=html, markdown=markdown, json=json)
    options = TuneOptions(
        time_budget=budget,
        allow=allow,
        metric=metric,
        accuracy_loss=allowed_loss,
        less_is_better=less_is_better,
        objective=objective,
        memory_limit=memory,
        run_steps=run_steps,
        timeout=timeout,
        workers=workers,
        worker_options=tuple(worker_options or ()),
    )
    console = open_console(stderr=True)
    with console.status("starting") as status:
        try:
            search = search_plan(target, options, log_beside=out, dashes="--", on_progress=status.update)
        except SearchStopped as e:
            console.print("interrupted; what was tried is saved, and the same command goes on from there")
            raise typer.Exit(e.exit_code) from None
        except ScriptEnded as e:
            sys.stderr.write(e.output)
            raise typer.Exit(e.exit_code) from None
    tuned = search.tuned
    takes_stdout = STANDARD_OUTPUT in (out, html, markdown, json)
    print_report(ladder_blocks(tuned), width=WIDTH, stderr=takes_stdout)
    commands = _commands(tuned, target, out)
    _write(tuned, out, target, commands, html=html, markdown=markdown, json=json)
    search.forget_log()
    if commands:
        print_lines("", *commands, stderr=takes_stdout)


def _commands(tuned: Tuned, target: ScriptTarget, out: Path) -> list[str]:
    """What to type to use the plan; none without levers."""
    from flatout.core.registry import lever_of
    from flatout.tune.search.script_search import is_text

    if not tuned.plan.lever:
        return []
    commands = [target.typed(f"flatout run --plan {out}")]
    if is_text(tuned.plan.lever, {planned.id: lever_of(planned.id) for planned in tuned.plan.lever}):
        edit = target.typed(f"flatout edit --plan {out}")
        commands.insert(0, f"{edit}   # the change as a diff, without a start of its own")
    return commands


def _diff_of(tuned: Tuned, target: ScriptTarget) -> tuple[str, ...]:
    """The lines of the plan as a change of the text, first what it lacks; () without levers."""
    from flatout.core.errors import FlatoutError
    from flatout.core.records.plan import text_root
    from flatout.tune.edits import edits

    if not tuned.plan.lever:
        return ()
    file = target.file
    try:
        found = edits(tuned.plan, file, root=Path(text_root(tuned.plan, file.absolute())))
    except FlatoutError as e:
        return (f"# there is no diff: {e}",)
    lacks = [f"# {one.planned.id} is not in it and stays in the plan: {one.because}" for one in found.stayed]
    lacks += [f"# start it with {name}={value}" for name, value in found.environment.items()]
    return (*lacks, *found.diff().splitlines())


def _write(
    tuned: Tuned,
    out: Path,
    target: ScriptTarget,
    commands: Sequence[str],
    *,
    html: Path | None,
    markdown: Path | None,
    json: Path | None,
) -> None:
    """The plan and the files that were asked for, each whole or not at all."""
    from flatout.core.files import write_all_files
    from flatout.core.records.plan import to_toml
    from flatout.core.records.record import to_json

    def page() -> bytes:
        from flatout.report.html import ladder_html

        return ladder_html(tuned, commands=commands, diff=_diff_of(tuned, target))

    def text() -> bytes:
        from flatout.report.markdown import markdown_report
        from flatout.report.parts.ladder import ladder_blocks

        return markdown_report(ladder_blocks(tuned)).encode()

    wanted = (
        (out, lambda: to_toml(tuned.plan)),
        (html, page),
        (markdown, text),
        (json, lambda: to_json(tuned)),
    )
    write_all_files((path, content) for path, content in wanted if path is not None)


COMMAND = Command(
    tune,
    order=150,
    group="fix",
    takes_script=True,
    examples=(
        "flatout tune --time-budget 5m train.py",
        "flatout tune --out plan.toml -m package.train -- --epochs 100",
        "flatout tune --workers slurm:8 --worker-option=--gres=gpu:1 train.py",
    ),
)
