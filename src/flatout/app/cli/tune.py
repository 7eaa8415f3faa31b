"""`flatout tune`: the fastest plan for a script that can be proved, without touching it."""

from __future__ import annotations

import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Final, Literal

import typer

from flatout.app.cli.check import observation_of, write_request
from flatout.app.cli.command import Command
from flatout.app.cli.observed import ObservedCommand, ObservedProcess
from flatout.app.cli.options import (
    ALLOWED_GUARANTEES,
    Allow,
    Arguments,
    ModuleName,
    Script,
    ScriptTarget,
    one_of,
    parsed_amount,
    parsed_seconds,
    require_writable,
    target_of,
)
from flatout.app.cli.terminal import open_console, print_lines, print_report
from flatout.core.errors import CaptureError
from flatout.core.files import STANDARD_OUTPUT

if TYPE_CHECKING:
    from flatout.core.records.evidence import Evidence
    from flatout.core.records.plan import Tuned

_RACE_S: Final = 6.0
_DECISIVE: Final = 1.3
"""Two processes of one script rarely differ by more (bench/results): a lever beyond that needs no second pair to be judged."""
_OBJECTIVES: Final[tuple[Literal["time", "memory"], ...]] = ("time", "memory")
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
_OBSERVED_FRACTION: Final = 0.04
_USUAL_BUDGET_S: Final = 300.0
"""With less than this, close looks and trials get as much less than `check` gives them, and a quarter at least."""
_MOST_OBSERVED_S: Final = 20.0


def tune(
    script: Script = None,
    arguments: Arguments = None,
    module: ModuleName = None,
    budget: Annotated[str, typer.Option("--time-budget", help="How long to search: 300, 300s, 5m, 1h.")] = "5m",
    allow: Allow = "bounded",
    metric: Annotated[
        str,
        typer.Option(
            metavar="PATTERN",
            help="What the script prints of its quality, as 'accuracy ([0-9.]+)': allows levers that change results.",
        ),
    ] = "",
    allowed_loss: Annotated[
        float, typer.Option("--accuracy-loss", help="How much of the metric a plan may lose.")
    ] = 0.0,
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
    out: Annotated[Path, typer.Option("--out", help="Where the plan goes.")] = Path("plan.toml"),
    html: Annotated[Path | None, typer.Option("--html", help="Write what was found to this file, as a page.")] = None,
    markdown: Annotated[Path | None, typer.Option("--markdown", help="Write it to this file as Markdown.")] = None,
    json: Annotated[Path | None, typer.Option("--json", help="Write it to this file as JSON.")] = None,
    timeout: Annotated[
        float, typer.Option(help="Seconds one process may take for its start or its first steps.")
    ] = 300.0,
) -> None:
    """Observe SCRIPT, try what may make it faster, each in processes of its own, and write the plan that could be proved.

    Every lever is named, measured and proved equal; the plan runs with `flatout run --plan plan.toml SCRIPT`. Interrupted, the
    same command goes on where it was.
    """
    from flatout.core.registry import lever_of, levers, rules
    from flatout.report.parts.ladder import WIDTH, ladder_blocks
    from flatout.tune.search.script_search import SearchSettings, is_text, search_script
    from flatout.tune.search.search_log import SearchLog
    from flatout.tune.verify.proof_terms import ProofTerms
    from flatout.tune.verify.quality import Metric, checked
    from flatout.tune.verify.side_process import Request as Wanted

    target = target_of(script, module, arguments, example="`flatout tune train.py -- --its --arguments`")
    file = target.file
    root = Path.cwd() if target.is_module and not file.is_absolute() else file.resolve().parent
    guarantee = one_of(ALLOWED_GUARANTEES, allow, name="--allow")
    require_writable(out=out, html=html, markdown=markdown, json=json)
    aim = one_of(_OBJECTIVES, objective, name="--objective")
    budget_s, most_bytes = parsed_seconds(budget, name="--time-budget"), _bytes(memory)
    quality = None
    if metric:
        quality = checked(Metric(pattern=metric, allowed_loss=allowed_loss, is_cost=less_is_better))
    terms = ProofTerms(guarantee=guarantee, budget_s=_RACE_S, timeout_s=timeout, decisive=_DECISIVE, metric=quality)
    request = Wanted(target=target.name, kind=target.kind, arguments=target.arguments)
    aims = (allow, objective, memory, metric, str(allowed_loss), str(less_is_better), str(run_steps))
    console = open_console(stderr=True)
    began_s = monotonic()
    with _one_stop(), console.status("observing the script") as status:
        try:
            evidence = _observe(target, budget_s)
            log_path = out.with_name(
                f".{out.stem}.{_fingerprint(evidence, root, file, target.arguments, aims)}.search-log"
            )
            tuned = search_script(
                request,
                file,
                evidence,
                rules(),
                levers(),
                SearchSettings(
                    terms=terms,
                    allow="quality" if metric else guarantee,
                    budget_s=max(1.0, budget_s - (monotonic() - began_s)),
                    log=SearchLog(log_path),
                    objective=aim,
                    num_steps=run_steps,
                    most_bytes=most_bytes,
                ),
                on_progress=status.update,
            )
        except _Stopped as e:
            console.print("interrupted; what was tried is saved, and the same command goes on from there")
            raise typer.Exit(e.exit_code) from None
    takes_stdout = STANDARD_OUTPUT in (out, html, markdown, json)
    print_report(ladder_blocks(tuned), width=WIDTH, stderr=takes_stdout)
    _write(tuned, out, html=html, markdown=markdown, json=json)
    if tuned.is_complete:
        log_path.unlink(missing_ok=True)
    if tuned.plan.lever:
        commands = [target.typed(f"flatout run --plan {out}")]
        if is_text(tuned.plan.lever, {planned.id: lever_of(planned.id) for planned in tuned.plan.lever}):
            commands.insert(
                0, f"{target.typed(f'flatout edit --plan {out}')}   # the change as a diff, without a start of its own"
            )
        print_lines("", *commands, stderr=takes_stdout)


def _write(tuned: Tuned, out: Path, *, html: Path | None, markdown: Path | None, json: Path | None) -> None:
    """The plan and the files that were asked for, each whole or not at all."""
    from flatout.core.files import write_all_files
    from flatout.core.records.plan import to_toml
    from flatout.core.records.record import to_json

    def page() -> bytes:
        from flatout.report.html import ladder_html

        return ladder_html(tuned)

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


def _observe(target: ScriptTarget, budget_s: float) -> Evidence:
    """What a run of the script shows, in a process of its own, which ends when enough was observed."""
    from flatout.core.records.evidence import Evidence as EvidenceRecord
    from flatout.core.records.record import from_json
    from flatout.core.runtime.script import INTERRUPTED

    with tempfile.TemporaryDirectory(prefix="flatout-") as name:
        folder = Path(name)
        path = folder / "evidence.json"
        observation = observation_of(
            target,
            observe_s=min(_MOST_OBSERVED_S, _OBSERVED_FRACTION * budget_s),
            stop=True,
            effort=min(1.0, max(0.25, budget_s / _USUAL_BUDGET_S)),
            is_for_search=True,
        )
        command = write_request(observation, folder / "request.json", evidence_path=path)
        with open(folder / "output", "wb") as output:
            process = ObservedProcess(ObservedCommand(command, is_complete=path.exists, stop=True, output=output))
            ended = process.wait()
            if ended.signal or ended.code == INTERRUPTED:
                raise _Stopped(ended.signal or signal.SIGINT)
            process.end_rest()
        if not path.exists():
            words = (folder / "output").read_text(errors="replace").strip().splitlines()[-3:]
            raise CaptureError(f"'{target.name}' could not be observed: {' | '.join(words) or 'it printed nothing'}")
        evidence = from_json(path.read_bytes(), EvidenceRecord)
        if not evidence.steps.num_timed and evidence.exit_code:
            sys.stderr.write((folder / "output").read_text(errors="replace"))
            raise typer.Exit(evidence.exit_code)
    if not evidence.steps.num_timed:
        raise CaptureError(
            f"'{target.name}' took no step of training or inference that could be timed; "
            "`flatout check` shows what was seen of it"
        )
    return evidence


class _Stopped(KeyboardInterrupt):
    """A signal that ends the search."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.exit_code = 128 + number  # as a shell has it


@contextmanager
def _one_stop() -> Iterator[None]:
    """The first Ctrl-C, SIGTERM or SIGHUP ends the search in order; later ones change nothing until this process has ended.

    SIGTERM and SIGHUP stay ignored where they are, as under nohup.
    """
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    for number in (signal.SIGTERM, signal.SIGHUP):
        if before[number] == signal.SIG_IGN:
            del before[number]

    def stopped(number: int, frame: FrameType | None) -> None:
        for one in before:
            signal.signal(one, signal.SIG_IGN)
        raise _Stopped(number)

    for number in before:
        signal.signal(number, stopped)
    try:
        yield
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) is stopped:
                signal.signal(number, handler)


def _fingerprint(
    evidence: Evidence, root: Path, script: Path, arguments: tuple[str, ...], wanted: tuple[str, ...]
) -> str:
    """Changes with what a trial depends on: the text of the script and of those of its files that steps ran through, its
    arguments, the device and torch, and what a plan is for."""
    import hashlib

    workload = evidence.workload
    files = {Path(s.file).resolve() for s in evidence.sources} | {script.resolve()}
    found = hashlib.sha256(repr((arguments, wanted, workload.device, workload.torch)).encode())
    for path in sorted(files):
        if path.is_relative_to(root) and path.is_file():
            found.update(path.read_bytes())
    return found.hexdigest()[:12]


def _bytes(text: str) -> int:
    """Bytes of a size such as '20GiB'; 0 for an empty text.

    >>> _bytes("20GiB") == 20 * 2**30
    True
    """
    if not text:
        return 0
    return int(
        parsed_amount(text, _SIZES, complaint=f"--memory-limit {text} is no size above 0; write 20GiB, 800MiB or 20GB")
    )


COMMAND = Command(
    tune,
    order=150,
    group="fix",
    takes_script=True,
    examples=(
        "flatout tune train.py --time-budget 5m",
        "flatout tune -m package.train --out plan.toml -- --epochs 100",
    ),
)
