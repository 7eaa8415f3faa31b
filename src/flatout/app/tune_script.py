"""`flatout.tune`, and what `flatout tune` runs: observe a script, and search for the fastest plan of it that can be proved."""

from __future__ import annotations

import hashlib
import shutil
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from types import FrameType
from typing import Final, Literal, NamedTuple

import msgspec

from flatout.app.observation import observation_of, write_request
from flatout.app.observed import ObservedCommand, ObservedProcess
from flatout.app.option_values import (
    ALLOWED_GUARANTEES,
    one_of,
    parsed_bytes,
    parsed_seconds,
    require_writable_file,
)
from flatout.app.results import ReportedResult
from flatout.app.targets import ScriptTarget
from flatout.app.tune_workers import workers_of
from flatout.core.errors import CaptureError, UsageError
from flatout.core.files import write_whole_file
from flatout.core.records.allowance import Allowance
from flatout.core.records.evidence import Evidence
from flatout.core.records.plan import Plan, Tuned, to_toml
from flatout.core.records.record import from_json, to_json
from flatout.core.registry import levers, rules
from flatout.core.runtime.cache_folder import create_cache_folder, default_cache_folder
from flatout.core.runtime.end_signals import END_SIGNALS
from flatout.core.runtime.script import INTERRUPTED
from flatout.core.secrets import redacted_arguments
from flatout.report.document import Block
from flatout.report.parts.ladder import WIDTH, ladder_blocks
from flatout.tune.search.script_search import SearchSettings, search_script
from flatout.tune.search.search_log import SearchLog
from flatout.tune.verify.proof_terms import ProofTerms
from flatout.tune.verify.quality import Metric, checked
from flatout.tune.verify.side_process import Request

_RACE_S: Final = 6.0
_DECISIVE: Final = 1.3
"""Two processes of one script rarely differ by more (bench/results): a lever beyond that needs no second pair to be judged."""
_OBJECTIVES: Final[tuple[Literal["time", "memory"], ...]] = ("time", "memory")
_OBSERVED_FRACTION: Final = 0.04
_USUAL_BUDGET_S: Final = 300.0
"""With less than this, close looks and trials get as much less than `check` gives them, and a quarter at least."""
_MOST_OBSERVED_S: Final = 20.0
_NUM_LAST_LINES: Final = 3


class TuneOptions(NamedTuple):
    """What a search is to find and may take, as it was typed; the options of `flatout tune` of these names."""

    time_budget: float | str = "5m"
    allow: str = "bounded"
    metric: str = ""
    accuracy_loss: float | str = 0.0
    less_is_better: bool = False
    objective: str = "time"
    memory_limit: str = ""
    run_steps: int = 0
    timeout: float = 300.0
    workers: str = ""
    worker_options: tuple[str, ...] = ()


class Search(NamedTuple):
    """What a search found, and the file of what it tried, from which the same search goes on."""

    tuned: Tuned
    log_path: Path

    def forget_log(self) -> None:
        """Delete the file of what was tried, where everything was; call it once the plan is written."""
        if self.tuned.is_complete:
            self.log_path.unlink(missing_ok=True)


class ScriptEnded(CaptureError):
    """The script failed before a step could be timed; `output` is all that it printed, `exit_code` its own."""

    def __init__(self, name: str, output: str, exit_code: int) -> None:
        super().__init__(f"'{name}' ended with code {exit_code} before a step could be timed: {_last_lines(output)}")
        self.output = output
        self.exit_code = exit_code


class SearchStopped(KeyboardInterrupt):
    """A signal that ends the search; `exit_code` is the shell's for it."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.exit_code = 128 + number


@dataclass(frozen=True, kw_only=True, repr=False)
class TunedScript(ReportedResult):
    """What `flatout.tune` returns: the plan, what each of its levers was proved to do, and what was left out."""

    tuned: Tuned

    width = WIDTH

    @property
    def plan(self) -> Plan:
        """The levers that were proved, maybe none."""
        return self.tuned.plan

    def blocks(self) -> list[Block]:
        return ladder_blocks(self.tuned)

    def short_blocks(self) -> list[Block]:
        return self.blocks()

    def page(self) -> bytes:
        from flatout.report.html import ladder_html

        return ladder_html(self.tuned)

    def record_json(self) -> bytes:
        return to_json(self.tuned)

    def save_plan(self, path: str | Path) -> None:
        """Write the plan as TOML, for `flatout run --plan`. Raises RecordError when the file cannot be written."""
        write_whole_file(Path(path), to_toml(self.plan))


def tune(
    script: str | Path,
    *arguments: object,
    is_module: bool = False,
    time_budget: float | str = "5m",
    allow: Literal["exact", "bounded", "distribution"] = "bounded",
    metric: str = "",
    accuracy_loss: float | str = 0.0,
    less_is_better: bool = False,
    objective: Literal["time", "memory"] = "time",
    memory_limit: str = "",
    run_steps: int = 0,
    timeout: float = 300.0,
    workers: str = "",
    worker_options: Sequence[str] = (),
    out: str | Path | None = None,
    on_progress: Callable[[str], None] = lambda _: None,
) -> TunedScript:
    """Search for what makes a script faster, as `flatout tune` does: each lever in processes of its own, each proved equal.

    The script's file and this process stay as they are; all that runs of the script runs elsewhere. Interrupted, or out of time,
    the same call goes on where it was.

    Args:
        script: The script's path, or with `is_module` a module's name.
        *arguments: The script's own arguments.
        is_module: Run it like `python -m`.
        time_budget: How long to search: seconds, or a text such as '5m'.
        allow: The weakest guarantee of a lever: 'exact' (the same bits), 'bounded', 'distribution' (other random numbers),
            'quality' (coarser numbers, judged by the metric, or by the first losses on three seeds).
        metric: A pattern with one group for what the script prints of its quality: allows levers that change results.
        accuracy_loss: How much of the metric a plan may lose, in its own unit or as a share such as '1%'; without a metric, how
            much higher the loss may be.
        less_is_better: Whether the metric is a loss or an error.
        objective: What is to become less.
        memory_limit: What a step may hold at most, of the device or else the process, such as '20GiB'; '' for no limit.
        run_steps: Steps of the runs that the plan is for; 0: as many as the script has, where it comes to its end.
        timeout: Seconds one process may take for its start or its first steps.
        workers: Who makes comparisons ahead of the search: 'slurm:4' (tasks of a job array), 'ray:4', or '' for nobody.
        worker_options: Options of sbatch, such as '--gres=gpu:1', or resources of a Ray task, such as 'num_gpus=1'.
        out: Where the plan is written, if anywhere.
        on_progress: Called with a line whenever something else is done.

    Returns:
        The plan with what was measured, predicted and left out, which draws itself; its `plan` may be empty.

    Raises:
        UsageError: An argument has a value that it cannot have, or there is no such script.
        CaptureError: The script took no step that could be timed, or failed; what it printed last is in the message.
    """
    target = ScriptTarget(str(script), is_module, tuple(map(str, arguments)))
    options = TuneOptions(
        time_budget=time_budget,
        allow=allow,
        metric=metric,
        accuracy_loss=accuracy_loss,
        less_is_better=less_is_better,
        objective=objective,
        memory_limit=memory_limit,
        run_steps=run_steps,
        timeout=timeout,
        workers=workers,
        worker_options=tuple(worker_options),
    )
    path = Path(out) if out is not None else None
    if path is not None:
        require_writable_file(path, name="out")
    with _handlers_restored():
        search = search_plan(target, options, log_beside=path or _log_place(target), on_progress=on_progress)
    if path is not None:
        write_whole_file(path, to_toml(search.tuned.plan))
    search.forget_log()
    return TunedScript(tuned=search.tuned)


def search_plan(
    target: ScriptTarget,
    options: TuneOptions,
    *,
    log_beside: Path,
    dashes: Literal["", "--"] = "",
    on_progress: Callable[[str], None],
) -> Search:
    """Observe the target and search within the options; what was tried is saved beside a file, from where a search goes on.

    `dashes` stand before the options' names in messages.

    Raises:
        UsageError: An option or the target cannot be used.
        ScriptEnded: The script failed before a step could be timed.
        CaptureError: It took no step that could be timed.
        SearchStopped: A signal ended the search.
    """

    def named(option: str) -> str:
        return f"--{option.replace('_', '-')}" if dashes else option

    file = target.file
    root = Path.cwd() if target.is_module and not file.is_absolute() else file.resolve().parent
    guarantee = one_of(ALLOWED_GUARANTEES, options.allow, name=named("allow"))
    aim = one_of(_OBJECTIVES, options.objective, name=named("objective"))
    budget_s = parsed_seconds(str(options.time_budget), name=named("time_budget"))
    most_bytes = parsed_bytes(options.memory_limit, name=named("memory_limit"))
    if options.run_steps < 0:
        raise UsageError(f"{named('run_steps')} {options.run_steps} must be 0 or more")
    if options.timeout <= 0:
        raise UsageError(f"{named('timeout')} {options.timeout:g} must be above 0")
    allowed = Allowance.of(options.accuracy_loss, name=named("accuracy_loss"))
    terms = ProofTerms(
        guarantee="bounded" if guarantee == "quality" else guarantee,
        allowed_loss=allowed,
        budget_s=_RACE_S,
        timeout_s=options.timeout,
        decisive=_DECISIVE,
        metric=_metric_of(options, allowed),
    )
    aims = (
        *(options.allow, options.objective, options.memory_limit, options.metric, str(options.accuracy_loss)),
        *(str(options.less_is_better), str(options.run_steps)),
    )
    worker_folder = log_beside.with_name(f".{log_beside.stem}.workers")
    workers = workers_of(options.workers, worker_folder, options=options.worker_options)
    began_s = monotonic()
    with one_stop():
        on_progress("observing the script")
        evidence = _observe(target, budget_s)
        observing_s = monotonic() - began_s
        key = _fingerprint(evidence, root, file, target.arguments, aims)
        log_path = log_beside.with_name(f".{log_beside.stem}.{key}.search-log")
        tuned = search_script(
            Request(target=target.name, kind=target.kind, arguments=target.arguments),
            file,
            evidence,
            rules(),
            levers(),
            SearchSettings(
                terms=terms,
                allow="quality" if options.metric else guarantee,
                budget_s=max(1.0, budget_s - observing_s),
                log=SearchLog(log_path),
                objective=aim,
                num_steps=options.run_steps,
                most_bytes=most_bytes,
                workers=workers,
            ),
            on_progress=on_progress,
        )
    shutil.rmtree(worker_folder, ignore_errors=True)
    return Search(msgspec.structs.replace(tuned, observing_s=observing_s), log_path)


def _log_place(target: ScriptTarget) -> Path:
    """The file, in the user's cache folder, beside which a search without a plan to write saves what it tried."""
    folder = default_cache_folder()
    create_cache_folder(folder)
    where = hashlib.sha256(str(target.file.resolve()).encode()).hexdigest()[:8]
    return folder / f"{target.file.stem}-{where}.toml"


def _metric_of(options: TuneOptions, allowed: Allowance) -> Metric | None:
    if not options.metric:
        return None
    return checked(Metric(pattern=options.metric, allowed_loss=allowed, is_cost=options.less_is_better))


def _observe(target: ScriptTarget, budget_s: float) -> Evidence:
    """What a run of the script shows, in a process of its own, which ends when enough was observed."""
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
                raise SearchStopped(ended.signal or signal.SIGINT)
            process.end_rest()
        printed = (folder / "output").read_text(errors="replace")
        if not path.exists():
            raise CaptureError(f"'{target.name}' could not be observed: {_last_lines(printed)}")
        evidence = from_json(path.read_bytes(), Evidence)
    if not evidence.steps.num_timed and evidence.exit_code:
        raise ScriptEnded(target.name, printed, evidence.exit_code)
    if not evidence.steps.num_timed:
        raise CaptureError(
            f"'{target.name}' took no step of training or inference that could be timed; "
            "`flatout check` shows what was seen of it"
        )
    return evidence


def _last_lines(output: str) -> str:
    return " | ".join(output.strip().splitlines()[-_NUM_LAST_LINES:]) or "it printed nothing"


@contextmanager
def one_stop() -> Iterator[None]:
    """The first Ctrl-C, SIGTERM or SIGHUP ends the search in order; later ones change nothing until this process has ended.

    SIGTERM and SIGHUP stay ignored where they are, as under nohup. Outside the main thread, which gets them, nothing is watched.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, *END_SIGNALS)}
    for number in END_SIGNALS:
        if before[number] == signal.SIG_IGN:
            del before[number]

    def stopped(number: int, frame: FrameType | None) -> None:
        for one in before:
            signal.signal(one, signal.SIG_IGN)
        raise SearchStopped(number)

    for number in before:
        signal.signal(number, stopped)
    try:
        yield
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) is stopped:
                signal.signal(number, handler)


@contextmanager
def _handlers_restored() -> Iterator[None]:
    """Signals are handled afterwards as before, also after one that has ended a search: a notebook's process goes on."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, *END_SIGNALS)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _fingerprint(
    evidence: Evidence, root: Path, script: Path, arguments: tuple[str, ...], wanted: tuple[str, ...]
) -> str:
    """Changes with what a trial depends on: the text of the script and of those of its files that steps ran through, its
    arguments, the device and torch, and what a plan is for."""
    workload = evidence.workload
    files = {Path(s.file).resolve() for s in evidence.sources} | {script.resolve()}
    found = hashlib.sha256(repr((redacted_arguments(arguments), wanted, workload.device, workload.torch)).encode())
    for path in sorted(files):
        if path.is_relative_to(root) and path.is_file():
            found.update(path.read_bytes())
    return found.hexdigest()[:12]
