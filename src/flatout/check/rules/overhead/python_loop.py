"""A Python loop does in many tiny operators what a few large ones would do.

Costs        The dispatch of every operator, forward and backward, and the Python in between.
Evidence     Lines inside one loop whose operators run many times a step on little data. Recurrent cells called step by step
             are priced by a trial of torch's layer over the whole sequence; loops whose iterations do not feed one another by
             what the same arithmetic costs in one piece on the measured machine.
Levers       graph.vectorise, graph.fused-recurrence, graph.compile-loop
False alarm  A loop over a model's layers (each iteration is another module), over micro-batches or steps, or over operators so
             large that the dispatch does not matter; iterations that depend on one another outside torch, because an environment
             is stepped in the loop or a value read in it may decide what the next tensor holds; operators that meet other shapes
             in each iteration, which cannot be stacked (rows picked by a mask can be summed by index_add).
"""

from __future__ import annotations

from collections.abc import Iterator

from flatout.core.parts import rule
from flatout.core.records.evidence import Evidence, RepeatedModule
from flatout.core.records.finding import Finding
from flatout.core.records.trial import TimeRecurrence
from flatout.machine.cost.accounting import (
    group_by,
    has_backward,
    loops_around,
    operator_seconds,
    result_of,
    rows_at,
    step_loops,
    usual_calls,
)
from flatout.machine.cost.iterations import (
    bytes_at_once,
    feeds_itself_through_host,
    have_various_shapes,
    shared_shapes,
    steps_environment,
)
from flatout.machine.cost.parameters import parameter_loops
from flatout.machine.cost.roofline import operation_floor
from flatout.machine.cost.trace import longest_dependence

_MANY = 12
_SMALL_OP_S = 150e-6
_SEQUENTIAL = 0.7
_WORTH_A_TRIAL = 0.05
_MOST_IN_ONE_PIECE = 0.6
"""Of the loop's time: when the same work in one piece takes more, its operators are large, and the loop costs little."""


_MOST_BESIDE_OPERATORS = 1.3
"""A trial of a recurrence is believed up to so many times what its operators add up to in the step."""
_ENOUGH_SAMPLES = 20


def propose(evidence: Evidence) -> Iterator[TimeRecurrence]:
    """Time torch's layer for each recurrent cell that is called step by step."""
    for cell in evidence.recurrences:
        rows = rows_at(evidence, (cell.source,))
        if cell.calls >= _MANY and operator_seconds(evidence, rows) > _WORTH_A_TRIAL * evidence.steps.step_s:
            yield _trial_of(evidence, cell)


def check(evidence: Evidence) -> Iterator[Finding]:
    """Yield one finding per loop."""
    own = step_loops(evidence)
    candidates = [s for s in {o.source for o in evidence.operators if o.phase != "backward"} if s >= 0]
    waiting = {r.source for r in evidence.host_reads if r.on_device}  # overhead.host-read judges those
    # overhead.parameter-loop judges those
    waiting |= {evidence.operators[i].source for rows in parameter_loops(evidence).values() for i in rows}
    waiting |= {c.source for c in evidence.collectives}
    repeated = [s for s in candidates if s not in waiting and _is_repeated(evidence, s)]
    inside = group_by(repeated, lambda s: next((loop for loop in loops_around(evidence, s) if loop not in own), None))
    for loop, sources in inside.items():
        if loop is not None:
            yield from _judge(evidence, loop, sources)


def _is_repeated(evidence: Evidence, source: int) -> bool:
    """Whether this line's operators run many times a step in one module, on little data each."""
    rows = [o for o in evidence.operators if o.source == source and o.phase not in ("backward", "optimizer")]
    calls = sum(o.num_calls for o in rows)
    if usual_calls(rows) < _MANY:
        return False
    return sum(o.op_s for o in rows) / calls < _SMALL_OP_S


def _judge(evidence: Evidence, loop: tuple[str, int], sources: list[int]) -> Iterator[Finding]:
    rows = rows_at(evidence, sources)
    cost_s = operator_seconds(evidence, rows)
    forward = [i for i in rows if evidence.operators[i].phase != "backward"]
    calls = usual_calls(evidence.operators[i] for i in forward)
    num_operators = sum(evidence.operators[i].num_calls for i in rows)
    depth = longest_dependence(evidence.trace, evidence.operators, set(forward))
    hottest = max(sources, key=lambda s: operator_seconds(evidence, rows_at(evidence, (s,))))
    cell = next((c for c in evidence.recurrences if c.source in sources and c.calls >= _MANY), None)
    result = result_of(evidence, _trial_of(evidence, cell)) if cell is not None else None
    if cell is not None and result is not None and result.now_s and result.cured_s is not None:
        at_cell_s = operator_seconds(evidence, rows_at(evidence, (cell.source,)))
        remaining = result.cured_s / result.now_s
        # The operators' own sum misses what autograd does between them; the trial ran the whole loop, backward included.
        tried_s = min(result.now_s - result.cured_s, _MOST_BESIDE_OPERATORS * at_cell_s * (1 - remaining))
        low_s = 0.9 * max(at_cell_s * (1 - remaining), tried_s)
        saved_s = (max(0.0, low_s), max(0.0, cost_s - at_cell_s * remaining, tried_s))
        layer = f"nn.{cell.kind.removesuffix('Cell')}"
        what = f"{layer} over the whole sequence takes {remaining:.0%} of that (tried)"
        edit = f"use {layer}(..., batch_first=True) on the whole sequence instead of the loop"
        hottest = cell.source
    elif _is_sequential_outside_torch(evidence, loop, forward):
        return
    elif depth >= _SEQUENTIAL * calls:
        python_s = 0.0 if evidence.steps.is_device_bound else sum(evidence.operators[i].python_s for i in rows)
        saved_s = (0.25 * python_s, 0.9 * python_s)
        what = "each iteration needs the one before, so only the overhead can go"
        edit = "move what does not depend on the state out of the loop, then compile the rest of the body"
    elif have_various_shapes(evidence, forward):
        return
    else:
        whole_s = _in_one_piece_s(evidence, rows, max(1, depth))
        cost_s = max(cost_s, _sampled_s(evidence, sources, rows))
        if whole_s > _MOST_IN_ONE_PIECE * cost_s:
            return
        saved_s = (max(0.0, 0.95 * cost_s - whole_s), max(0.0, cost_s - 0.5 * whole_s))
        what = f"the iterations do not feed one another; in one piece the same arithmetic takes about {whole_s * 1e3:.2f} ms"
        edit = "do it for all rows at once: index or stack the inputs with a leading dimension and drop the loop"
    yield Finding(
        where=evidence.source_of(hottest),
        cost_s=cost_s,
        saved_s=saved_s,
        because=f"a loop runs {calls:.0f} times a step, {num_operators:.0f} operators in all, {cost_s * 1e3:.2f} ms; {what}",
        edit=edit,
        also=evidence.sources_of(sources),
        operators=rows,
        basis="trial" if result is not None else "estimate",
    )


def _is_sequential_outside_torch(evidence: Evidence, loop: tuple[str, int], forward: list[int]) -> bool:
    """Whether an iteration waits for the one before though the trace shows no tensor that goes from one to the next.

    A loop inside an environment that is itself written in torch is judged by the trace alone.
    """
    if all(evidence.operators[i].phase == "environment" for i in forward):
        return False
    return steps_environment(evidence, loop) or feeds_itself_through_host(evidence, loop)


def _sampled_s(evidence: Evidence, sources: list[int], rows: tuple[int, ...]) -> float:
    """What the loop's lines take by the samples, and their backward by the operators; 0 where the samples are few."""
    lines = [r for r in evidence.lines if r.source in sources and r.process == "main" and r.phase != "backward"]
    if sum(r.num_samples for r in lines) < _ENOUGH_SAMPLES:
        return 0.0
    backward = tuple(i for i in rows if evidence.operators[i].phase == "backward")
    return sum(r.seconds for r in lines) + operator_seconds(evidence, backward)


def _trial_of(evidence: Evidence, cell: RepeatedModule) -> TimeRecurrence:
    rows = rows_at(evidence, (cell.source,))
    return TimeRecurrence(
        cell=cell.kind,
        batch=cell.batch,
        steps=cell.calls,
        input_size=cell.input_size,
        hidden_size=cell.hidden_size,
        backward=has_backward(evidence, rows),
    )


def _in_one_piece_s(evidence: Evidence, rows: tuple[int, ...], depth: int) -> float:
    """Seconds of the same work with each operator called on all the data at once, `depth` times where iterations follow."""
    machine = evidence.machine

    def kind(row: int) -> tuple[str, int, str, str]:
        operator = evidence.operators[row]
        return operator.op, operator.source, operator.module, operator.phase

    total = 0.0
    groups = list(group_by(rows, kind).values())
    shared = shared_shapes(evidence, groups)
    for group in groups:
        operators = [evidence.operators[i] for i in group]
        flop = sum(o.flop * o.num_calls for o in operators)
        moved = bytes_at_once(evidence, group, shared=shared)
        overhead_s = 10e-6
        floor_s = 0.0
        if machine is not None:
            dtype = operators[0].inputs[0].dtype if operators[0].inputs else "float32"
            dtype = dtype if dtype in machine.matmul_flop_per_s else "float32"
            floor = operation_floor(machine, flop=flop, traffic_bytes=moved, dtype=dtype)
            floor_s, overhead_s = floor.floor_s, floor.overhead_s or overhead_s
        total += max(2 * floor_s, depth * overhead_s)
    return total


RULE = rule(__name__, check, propose=propose, title="A Python loop of tiny operators", rewrites_line=True)
