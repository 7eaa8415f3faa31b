"""A line spends its time in Python, not in tensor operators.

Costs        The host's time; on a GPU it is hidden only while the device has work queued.
Evidence     A sampler finds the step at this line far longer than the line's operators run: NumPy round trips, parsing, copying
             of state, logging.
Levers       graph.vectorise, graph.hoist-constant, graph.compile-loop, memory.gather-once, communication.tensors-once
False alarm  The lines that wait on purpose (the loader, the backward call); sampling noise.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from flatout.core.parts import rule
from flatout.core.records.evidence import Evidence, LineTime
from flatout.core.records.finding import Finding
from flatout.machine.cost.accounting import group_by
from flatout.machine.cost.lines import Line, line_finder, source_of_line

_FEWEST_SAMPLES = 8
_PHASES = ("forward", "other")


def check(evidence: Evidence) -> Iterator[Finding]:
    """Yield one finding per line that a sampler found busy without operators."""
    if evidence.steps.is_device_bound:
        return
    skip = {r.source for r in evidence.host_reads if r.on_device}  # there the host waits; overhead.host-read judges it
    skip |= (
        set(evidence.backward_sources) | {o.source for o in evidence.optimizers} | {u.source for u in evidence.loaders}
    )
    skip |= {c.source for c in evidence.collectives}  # waiting for other ranks is not Python
    line_of = line_finder(evidence)
    skipped = {line_of(s) for s in skip}
    rows = [r for r in evidence.lines if r.process == "main" and r.phase in _PHASES and r.source >= 0]
    scale = _growth(evidence)
    in_operators: dict[Line | None, float] = defaultdict(float)
    for operator in evidence.operators:
        if operator.phase not in ("backward", "optimizer"):
            in_operators[line_of(operator.source)] += scale * operator.op_s
    for line, sampled in group_by(rows, lambda r: line_of(r.source)).items():
        total_s, num = sum(r.seconds for r in sampled), sum(r.num_samples for r in sampled)
        python_s = total_s - in_operators[line]
        if line is None or line in skipped or num < _FEWEST_SAMPLES or python_s <= 0.5 * total_s:
            continue
        package = "" if line.library else _library(evidence, sampled)
        yield Finding(
            where=source_of_line(evidence, sampled[0].source, line),
            cost_s=python_s,
            saved_s=(0.5 * python_s, 0.95 * python_s),
            because=f"{num} samples put {total_s * 1e3:.2f} ms of a step on this line{package}, its tensor "
            f"operators take {in_operators[line] * 1e3:.2f} ms",
            edit="do it once before the loop, less often, or with tensor operators on all the data at once",
            operators=tuple(
                i
                for i, o in enumerate(evidence.operators)
                if line_of(o.source) == line and o.phase not in ("backward", "optimizer")
            ),
        )


def _library(evidence: Evidence, sampled: list[LineTime]) -> str:
    """The package below the line in which most of the time goes, in half a sentence; '' when it is the line's own."""
    by_package: dict[str, float] = defaultdict(float)
    for row in sampled:
        where = evidence.source_of(row.source)
        by_package[where.library.partition("/")[0] if where is not None else ""] += row.seconds
    package = max(by_package, key=lambda name: by_package[name])
    share = by_package[package] / sum(by_package.values())
    return f" ({share:.0%} of it in {package})" if package else ""


def _growth(evidence: Evidence) -> float:
    """How much longer the timed steps are than those in which operators were recorded.

    The samples come from all steps, the operators from a few early ones: where steps grow (a sequence that gets longer), the
    operators have grown with them.
    """
    then_s = evidence.observing.nearby_step_s
    return max(1.0, evidence.steps.step_s / then_s) if then_s else 1.0


RULE = rule(__name__, check, is_general=True, title="A line that spends its time in Python", rewrites_line=True)
