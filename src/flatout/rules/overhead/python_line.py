"""A line spends its time in Python, not in tensor operators.

Costs        The host's time; on a GPU it is hidden only while the device has work queued.
Evidence     A sampler finds the step at this line far longer than the line's operators run: NumPy round trips, parsing, copying
             of state, logging.
Levers       graph.vectorise
False alarm  The lines that wait on purpose (the loader, the backward call); sampling noise.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from flatout.records.evidence import Evidence
from flatout.records.finding import Finding, Rule

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
    if evidence.distributed is not None:
        skip |= {c.source for c in evidence.distributed.collectives}  # waiting for other ranks is not Python
    seconds: dict[int, float] = defaultdict(float)
    samples: dict[int, int] = defaultdict(int)
    for line in evidence.lines:
        if line.process == "main" and line.phase in _PHASES and line.source >= 0 and line.source not in skip:
            seconds[line.source] += line.seconds
            samples[line.source] += line.num_samples
    in_operators: dict[int, float] = defaultdict(float)
    for operator in evidence.operators:
        if operator.phase not in ("backward", "optimizer"):
            in_operators[operator.source] += operator.op_s
    for source, total_s in seconds.items():
        python_s = total_s - in_operators[source]
        if samples[source] < _FEWEST_SAMPLES or python_s <= 0.5 * total_s:
            continue
        yield Finding(
            rule=RULE.id,
            regime="overhead",
            where=evidence.source_of(source),
            cost_s=python_s,
            saved_s=(0.5 * python_s, 0.95 * python_s),
            because=f"{samples[source]} samples put {total_s * 1e3:.2f} ms of a step on this line, its tensor operators take "
            f"{in_operators[source] * 1e3:.2f} ms",
            edit="do it once before the loop, less often, or with tensor operators on all the data at once",
            levers=RULE.levers,
            operators=tuple(
                i
                for i, o in enumerate(evidence.operators)
                if o.source == source and o.phase not in ("backward", "optimizer")
            ),
        )


RULE = Rule(
    id="overhead.python-line",
    title="A line that spends its time in Python",
    module=__name__,
    check=check,
    levers=("graph.vectorise",),
    is_general=True,
)
