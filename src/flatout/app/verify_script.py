"""`flatout.verify`, and what `flatout verify` runs: is a changed script equal to the one before, and faster?"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, NamedTuple

import msgspec

from flatout.app.option_values import ALLOWED_GUARANTEES, one_of
from flatout.app.plans import environment_of, precision_of_plan, read_plan
from flatout.app.results import ReportedResult
from flatout.app.targets import ScriptTarget, require_file
from flatout.core.errors import UsageError
from flatout.core.files import write_whole_file
from flatout.core.records.plan import Plan, to_toml
from flatout.core.records.record import to_json
from flatout.core.records.verdict import PRECISIONS, Verdict
from flatout.report.document import Block
from flatout.report.parts.verdict import verdict_blocks
from flatout.tune.verify.proof import prove_script
from flatout.tune.verify.proof_terms import ProofTerms
from flatout.tune.verify.side_process import Request

_WANTED: Final = "two scripts that you would give to python, or a plan and a script"


class VerifyOptions(NamedTuple):
    """How a change is judged, as it was typed; the options of `flatout verify` of these names."""

    allow: str = "bounded"
    at: str = ""
    steps: int = 8
    seconds: float = 15.0
    timeout: float = 300.0
    seed: int = 0
    no_speed: bool = False
    no_equality: bool = False


@dataclass(frozen=True, kw_only=True, repr=False)
class VerifiedChange(ReportedResult):
    """What `flatout.verify` returns: the Verdict on a change, with what was compared and measured."""

    verdict: Verdict

    @property
    def is_proved(self) -> bool:
        """Whether the change is equal and, where that was asked for, faster."""
        return self.verdict.outcome == "proved"

    def blocks(self) -> list[Block]:
        return verdict_blocks(self.verdict)

    def short_blocks(self) -> list[Block]:
        return self.blocks()

    def page(self) -> bytes:
        from flatout.report.html.document import document_page

        return document_page(self.blocks(), command=f"{self.verdict.before} -> {self.verdict.after}")

    def record_json(self) -> bytes:
        return to_json(self.verdict)


def verify(
    before: Plan | str | Path,
    after: str | Path,
    *arguments: object,
    is_module: bool = False,
    allow: Literal["exact", "bounded", "distribution"] = "bounded",
    at: Literal["", "float64", "float32", "tf32", "float16", "bfloat16"] = "",
    steps: int = 8,
    seconds: float = 15.0,
    timeout: float = 300.0,
    seed: int = 0,
    no_speed: bool = False,
    no_equality: bool = False,
    on_progress: Callable[[str], None] = lambda _: None,
) -> VerifiedChange:
    """Prove that a changed script is equal to the one before and faster, as `flatout verify` does, in processes of their own.

    Args:
        before: The script as it was; or a plan, or the path of its file (.toml), for the script that follows.
        after: The script as it is now, or that of the plan.
        *arguments: Arguments of both scripts.
        is_module: Whether `after` is a module's name, for which a plan is to be proved.
        allow: What may differ: 'exact' (nothing), 'bounded' (rounding), 'distribution' (other random numbers too).
        at: Whose rounding counts; '' is the script's own, or the plan's.
        steps: How many steps are compared.
        seconds: How long to race the two, in all.
        timeout: Seconds a process may take for its start or its first steps.
        seed: Moves all seeds that the scripts set.
        no_speed: Compare only, do not race.
        no_equality: Race only; nothing is proved then.
        on_progress: Called with a line whenever something else is done.

    Returns:
        The Verdict, which draws itself.

    Raises:
        UsageError: An argument has a value that it cannot have, or there is no such script.
        PlanError: The plan cannot be read.
        VerificationError: The script before the change does not come to the end of its first steps.
    """
    target = ScriptTarget(str(after), is_module, tuple(map(str, arguments)))
    options = VerifyOptions(allow, at, steps, seconds, timeout, seed, no_speed, no_equality)
    with _plan_file(before) as path:
        return VerifiedChange(verdict=prove_target(path, target, options, on_progress=on_progress))


def prove_target(
    before: Path,
    target: ScriptTarget,
    options: VerifyOptions,
    *,
    dashes: Literal["", "--"] = "",
    on_progress: Callable[[str], None],
) -> Verdict:
    """Prove the target against the script `before`, or with the plan `before` (.toml) against the target as it is.

    `dashes` stand before the options' names in messages.

    Raises:
        UsageError: An option or a script cannot be used.
        PlanError: The plan cannot be read.
        VerificationError: The script before the change does not come to the end of its first steps.
    """
    terms = _terms_of(options, dashes)
    require_file(before, what=_WANTED)
    require_file(target.file, what=_WANTED)
    script = Request(target=target.name, kind=target.kind, arguments=target.arguments)
    if before.suffix == ".toml":
        plan = read_plan(before)
        terms = msgspec.structs.replace(terms, at=options.at or precision_of_plan(plan))
        changed = msgspec.structs.replace(script, plan=str(before.absolute()), environment=environment_of(plan))
        return prove_script(script, changed, terms, on_progress=on_progress)
    if target.is_module:
        raise UsageError(f"-m {target.name} goes with a plan: `flatout verify plan.toml -m {target.name}`")
    first = ScriptTarget(str(before), False, target.arguments)
    unchanged = msgspec.structs.replace(script, target=str(first.file))
    return prove_script(unchanged, script, terms, on_progress=on_progress)


def _terms_of(options: VerifyOptions, dashes: str) -> ProofTerms:
    one_of(("", *PRECISIONS), options.at, name=f"{dashes}at")
    if options.steps < 1:
        raise UsageError(f"{dashes}steps {options.steps} must be at least 1")
    if options.seconds <= 0 or options.timeout <= 0:
        raise UsageError(f"{dashes}seconds {options.seconds:g} and {dashes}timeout {options.timeout:g} must be above 0")
    return ProofTerms(
        guarantee=one_of(ALLOWED_GUARANTEES, options.allow, name=f"{dashes}allow"),
        num_steps=options.steps,
        budget_s=options.seconds,
        timeout_s=options.timeout,
        seed=options.seed,
        at=options.at,
        is_timed=not options.no_speed,
        is_compared=not options.no_equality,
    )


@contextmanager
def _plan_file(before: Plan | str | Path) -> Iterator[Path]:
    """The path as it is, or that of a file with the plan, which processes of their own read."""
    if not isinstance(before, Plan):
        yield Path(before)
        return
    with tempfile.TemporaryDirectory(prefix="flatout-") as folder:
        path = Path(folder) / "plan.toml"
        write_whole_file(path, to_toml(before))
        yield path
