"""What tuning found, as a ladder: the untouched script, each lever on top of those before, all together; what was left out."""

from __future__ import annotations

from typing import Final, NamedTuple

from flatout.core.records.lever import PlannedLever
from flatout.core.records.plan import PlanStep, Tuned
from flatout.core.records.verdict import Verdict
from flatout.core.units import duration, percent, size
from flatout.report.document import NEVER, Block, Column, Fold, Heading, Table
from flatout.report.parts.verdict import SAME_SIZE
from flatout.report.sanitise import Words

WIDTH: Final = 110
"""Columns at most on a terminal."""
_WIDE: Final = 104
"""Columns that the whole table takes with usual names."""
_RUN_LENGTHS: Final = tuple(10**n for n in range(2, 8))
"""Steps of whole runs for which the gain is told: those of them that come after the one from which on the plan pays."""
_NUM_LENGTHS: Final = 2
_MOST_LEFT_OUT: Final = 5
"""Levers that a terminal names with the reason why they are not in the plan: those that showed or promised most."""
_AS_ONE: Final = "as one with the next"
"""The text beside a lever whose own gain was not measured."""
_GUARANTEES: Final = {
    "exact": "Exact: losses, outputs, gradients and parameters of the compared steps are the same bits as without the plan.",
    "bounded": "Bounded: the same steps were computed in float64, too. Measured against them, losses, outputs, gradients and "
    "parameters are at most {factor} times as far off as those of the script without the plan.",
    "distribution": "Distribution: a run draws other random numbers, from the same distribution. When both sides draw alike, the "
    "steps are equal within rounding: at most {factor} times as far from float64 as those of the script without the plan.",
    "quality": "Quality: whole runs on several seeds end with a metric, or losses, within what was allowed; steps may differ.",
}
UNTOUCHED: Final = "untouched"
TOGETHER: Final = "all together"


class Row(NamedTuple):
    """One step in words, with the seconds of a step once it is reached and their interval (None where it was not timed)."""

    name: str
    step_s: tuple[float, float, float] | None
    predicted: str = ""
    measured: str = ""
    memory: str = ""
    guarantee: str = ""
    because: str = ""
    where: str = ""
    """The place in the source and the settings."""

    @property
    def step(self) -> str:
        """A step's time, as it is shown; '' where it is not known."""
        return duration(self.step_s[0]) if self.step_s is not None else ""


def ladder_blocks(tuned: Tuned) -> list[Block]:
    """The plan's levers with what was predicted and measured, the final proof, and the other levers with the reasons."""
    style = "bold green" if tuned.plan.lever else "bold yellow"
    blocks: list[Block] = [Heading(ladder_headline(tuned), style=style, is_title=True)]
    if tuned.plan.lever:
        found = ladder_rows(tuned)
        blocks += ["", _levers(found)]
        places = [(str(number), Words(row.where, "dim")) for number, row in enumerate(found) if row.where]
        blocks += ["", Table([Column(style="dim"), Column()], places)] if places else []
    if whole := _whole_run(tuned):
        blocks += ["", Words(whole)]
    if where := _proof_circumstances(tuned):
        blocks += ["", Words(where, style="dim")]
    at_stake = sorted((one for one in tuned.left_out if one.is_for_script), key=lambda one: -one.gain)
    tried = [[one.lever, one.because] for one in at_stake]
    others = [[one.lever, one.because] for one in tuned.left_out if not one.is_for_script]
    pair = [Column(), Column()]
    if tried:
        title = "Tried or considered, and left out"
        rest = len(tried) - _MOST_LEFT_OUT
        more = [Words(f"and {rest} that promised less", style="dim")] if rest > 0 else []
        brief_tried: list[Block] = [Heading(title), Table(pair, tried[:_MOST_LEFT_OUT]), *more]
        blocks += ["", Fold(title, [Table(pair, tried)], brief_tried)]
    if others:
        number = len({lever for lever, _ in others})
        how_many = f"{number} other lever{'s are' if number > 1 else ' is'}"
        sentence = f"{how_many} not for this script (--html, --markdown and --json say why)"
        brief: list[Block] = [Words(sentence, style="dim")]
        blocks += ["", Fold("Not for this script", [Table(pair, others)], brief)]
    if took := _time_taken(tuned):
        blocks += ["", took]
    if not tuned.is_complete:
        blocks += ["", "The time was up before everything had been tried; the same command goes on from here."]
    return blocks


def _time_taken(tuned: Tuned) -> str:
    """What the search spent its time on; '' where that is not known."""
    compared = [a.verdict.seconds for a in tuned.attempts if a.verdict.seconds]
    if not tuned.observing_s or not compared:
        return ""
    comparisons = f"{len(compared)} comparison{'s' if len(compared) > 1 else ''} {duration(sum(compared))}"
    return f"Observing the script took {duration(tuned.observing_s)}, {comparisons}."


def _levers(found: tuple[Row, ...]) -> Table:
    columns = [
        Column(),
        Column("lever", is_whole=True),
        Column("measured", is_whole=True),
        Column("predicted", from_width=_WIDE),
        Column("step"),
        Column("memory", from_width=_WIDE),
        Column("guarantee"),
        Column("because", from_width=NEVER),
    ]
    rows = [
        [
            str(number) if row.name not in (UNTOUCHED, TOGETHER) else "",
            *(row.name, row.measured, row.predicted, row.step, row.memory, row.guarantee, row.because),
        ]
        for number, row in enumerate(found)
    ]
    return Table(columns, rows, title="The levers of the plan")


def ladder_headline(tuned: Tuned) -> str:
    """The answer in a sentence."""
    plan, proof = tuned.plan, tuned.proof
    if not plan.lever or proof is None or proof.speed is None:
        return f"No plan: {plan.because or 'nothing that was tried is equal and faster'}."
    speed = proof.speed
    steps = f"{duration(speed.before_s)} -> {duration(speed.after_s)} a step, proved {_guarantee_text(proof)} {_on_seeds(tuned)}"
    if not speed.is_faster and proof.footprints:
        print_ = proof.footprints[-1]
        return f"{size(print_.before_bytes)} -> {size(print_.after_bytes)} at the peak, {steps}"
    return f"{speed.ratio:.2f}x faster ({speed.low:.2f} - {speed.high:.2f}), {steps}"


def _on_seeds(tuned: Tuned) -> str:
    """Whether what was proved was proved once more on random numbers that nothing was chosen with."""
    is_trial = any(a.verdict == tuned.proof for a in tuned.attempts if a.kind not in ("final", "final-again"))
    return "in its trial (no time was left for fresh seeds)" if is_trial else "on fresh seeds"


def _predicted(low: float, high: float) -> str:
    """A promise as a range; the most alone where it says little.

    >>> _predicted(1.2, 1.5), _predicted(1.0, 10.0)
    ('1.20 - 1.50x', 'up to 10.0x')
    """
    return f"{low:.2f} - {high:.2f}x" if high <= 2 * low else f"up to {high:.1f}x"


def _whole_run(tuned: Tuned) -> str:
    """What the plan gains from the start of python on, '' where that is not known."""
    plan, speed = tuned.plan, tuned.proof.speed if tuned.proof is not None else None
    if not plan.lever or speed is None or plan.run_start_s is None or plan.pays_from is None:
        return ""
    later_s = speed.later_s + plan.run_start_s
    if later_s <= 0:
        return "A whole run gains from its first steps on."
    own = f", {duration(plan.run_start_s)} of that `flatout run` itself" if plan.run_start_s <= later_s else ""
    lengths = [n for n in _RUN_LENGTHS if n > plan.pays_from][:_NUM_LENGTHS]
    gains = ", ".join(f"{speed.gain_of_run(n, plan.run_start_s):.2f}x over {n:,}" for n in lengths)
    pays = f"a whole run pays from step {plan.pays_from:,} on" + (f" ({gains})" if gains else "")
    return f"The first steps end {duration(later_s)} later{own}: {pays}."


def _proof_circumstances(tuned: Tuned) -> str:
    """What it was proved on, '' where nothing was."""
    proof = tuned.proof
    if proof is None:
        return ""
    equality = proof.equality
    compared = f"{equality.num_steps} steps and {equality.num_tensors} tensors compared"
    if equality.guarantee == "quality":
        compared = equality.because[:1].upper() + equality.because[1:]
    return f"{compared}; {proof.device}; torch {proof.torch}, Python {proof.python}"


def ladder_rows(tuned: Tuned) -> tuple[Row, ...]:
    """The untouched script, each lever, all together. The time after each step is the first one, less what each lever saved."""
    speed = tuned.proof.speed if tuned.proof is not None else None
    left_s = speed.before_s if speed is not None else None
    found = [Row(UNTOUCHED, (left_s, left_s, left_s) if left_s is not None else None, measured="1.00x")]
    for step in tuned.steps or tuple(PlanStep(planned=planned) for planned in tuned.plan.lever):
        row = _row(step, left_s)
        left_s = row.step_s[0] if row.step_s is not None else left_s
        found.append(row)
    if tuned.proof is not None and speed is not None:
        together = (speed.after_s, speed.before_s / speed.high, speed.before_s / speed.low)
        measured = _range(speed.ratio, speed.low, speed.high)
        memory, guarantee = _memory(tuned.proof), _guarantee_text(tuned.proof)
        found.append(Row(TOGETHER, together, measured=measured, memory=memory, guarantee=guarantee))
    return tuple(found)


def _row(step: PlanStep, before_s: float | None) -> Row:
    planned = step.planned
    measured = planned.measured
    step_s = None
    if before_s is not None and measured is not None:
        step_s = (before_s / measured[0], before_s / measured[2], before_s / measured[1])
    return Row(
        name=planned.id,
        where=_where(planned),
        step_s=step_s,
        predicted=_predicted(*planned.predicted) if planned.predicted is not None else "",
        measured=_range(*measured) if measured is not None else _AS_ONE,
        memory=_memory(step.verdict) if step.verdict is not None else "",
        guarantee=_guarantee_text(step.verdict) if step.verdict is not None else planned.guarantee,
        because=planned.because,
    )


def _where(planned: PlannedLever) -> str:
    """Where the lever is pulled, and its settings."""
    parameters = dict(planned.parameters)
    code, file, function = (str(parameters.pop(name, "")) for name in ("code", "file", "function"))
    settings = ", ".join(f"{k}={v}" for k, v in parameters.items())
    place = ", ".join(filter(None, (file, function if function != "<module>" else "")))
    return "; ".join(filter(None, (f"{place}: {code}" if code else "", settings)))


def _range(ratio: float, low: float, high: float) -> str:
    return f"{ratio:.2f}x ({low:.2f} - {high:.2f})"


def guarantee_words(tuned: Tuned) -> str:
    """What the plan's guarantee says, in sentences; '' where nothing was proved."""
    if tuned.proof is None or not tuned.plan.lever:
        return ""
    equality = tuned.proof.equality
    sentences = _GUARANTEES.get(equality.guarantee, "").format(factor=f"{equality.factor:g}")
    if equality.at and equality.guarantee == "bounded":
        sentences += f" The rounding of {equality.at} is allowed, as the plan computes in it."
    return sentences


def _guarantee_text(verdict: Verdict) -> str:
    """The guarantee that was kept, and the precision whose rounding was allowed."""
    guarantee, at = verdict.equality.guarantee, verdict.equality.at
    return f"{guarantee} at {at}" if at and guarantee != "exact" else guarantee


def _memory(verdict: Verdict) -> str:
    """The peak afterwards, of the device where there is one, and how it changed."""
    if not verdict.footprints:
        return ""
    print_ = verdict.footprints[-1]
    change = print_.after_bytes / print_.before_bytes - 1 if print_.before_bytes else 0.0
    if abs(change) <= SAME_SIZE:
        return f"{size(print_.after_bytes)} (same)"
    return f"{size(print_.after_bytes)} ({'-' if change < 0 else '+'}{percent(abs(change))})"
