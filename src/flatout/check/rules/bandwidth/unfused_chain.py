"""A formula written as a chain of pointwise operators and reductions where one kernel would do.

Costs        Every operator reads its inputs from memory and writes its result back, and is dispatched on its own, forward and
             backward.
Evidence     Five or more operators in one function that a compiler fuses: pointwise ones, reductions, normalisations, softmax
             and losses. Trial, where the chain is a normalisation over the last dimension: torch's layer_norm or rms_norm at the
             same shape; else an estimate from the traffic of a fused kernel, and no more than compiling the whole module saved
             where that was tried.
Levers       memory.fusion, graph.compile
False alarm  Chains on tensors so small or so rare that they do not matter to the step. Fourier transforms, sorting, cumulative
             sums, gathers and shifts are kernels of their own, and operators on complex numbers run as they are in compiled
             code too: none of them counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import inf
from typing import Final

from flatout.core.parts import rule
from flatout.core.records.evidence import Evidence, Operator
from flatout.core.records.finding import Finding
from flatout.core.records.hardware import Machine
from flatout.core.records.trial import TimeCompiled, TimeNormalisation
from flatout.machine.cost.accounting import (
    around,
    group_by,
    has_backward,
    operator_seconds,
    remaining_fraction,
    result_of,
)
from flatout.machine.cost.families import family_of
from flatout.machine.cost.flops import short_name
from flatout.machine.cost.lines import function_finder
from flatout.machine.cost.module_cures import PricedCure, compiled_result, compiling_failed, main_call
from flatout.machine.cost.roofline import operation_floor

_FEWEST: Final = 5
_WORTH_A_TRIAL: Final = 0.05
_MANY_CALLS: Final = 12
_FUSIBLE_FAMILIES: Final = {"pointwise operators", "reductions", "normalisation", "softmax and losses"}
"""Of operators that Inductor lowers to loops of its own and fuses with one another."""
_ALSO_FUSIBLE: Final = {"native_dropout", "native_dropout_backward", "bernoulli_"}
_DRAWS: Final = ("native_dropout", "bernoulli_")
"""Random numbers take as long in a fused kernel: on a CPU that is far longer than the traffic."""
_NOT_FUSIBLE: Final = ("cum", "ctc")
"""In the names of operators of these families that need the positions before: a scan, or a kernel that Inductor only calls."""
_ROOTS: Final = {"aten.sqrt", "aten.rsqrt", "aten.pow", "aten.div", "aten.var", "aten.std"}
_FUSED_PASSES: Final = (2, 5)
"""Tensor-sized reads and writes of a fused pointwise kernel: one in, one out forward; saved input, gradient in and out, with a
second look at the input for the reduction, backward."""


def propose(evidence: Evidence) -> Iterator[TimeNormalisation]:
    """Time torch's own normalisation where a chain is one."""
    for rows in _chains(evidence):
        trial = _trial_of(evidence, rows)
        if trial is not None and operator_seconds(evidence, rows) > _WORTH_A_TRIAL * evidence.steps.step_s:
            yield trial


def check(evidence: Evidence) -> Iterator[Finding]:
    """Yield one finding per function."""
    for rows in _chains(evidence):
        cost_s = operator_seconds(evidence, rows)
        if cost_s < 0.02 * evidence.steps.step_s:
            continue
        trial = _trial_of(evidence, rows)
        result = result_of(evidence, trial)
        forward = [i for i in rows if evidence.operators[i].phase != "backward"]
        by_line = group_by(forward, lambda i: evidence.operators[i].source)
        num = len({(evidence.operators[i].op, evidence.operators[i].source) for i in forward})
        if result is not None and trial is not None:
            remaining = remaining_fraction(result)
            saved_s = around(cost_s * (1 - remaining), 0.2)
            what = f"F.{trial.kind}_norm takes {remaining:.0%} of that (tried)"
            edit = f"F.{trial.kind}_norm(x, x.shape[-1:], weight, ...) in place of these lines"
        elif evidence.machine is None or not _is_bandwidth_bound(evidence.machine, evidence, rows):
            continue  # no ceiling to compare with, or dispatch is what they cost: overhead.tiny-operators tells that
        else:
            fused_s = _fused_s(evidence.machine, evidence, rows)
            low, high = _most_saved_s(evidence, rows)
            saved_s = (min(low, 0.4 * max(0.0, cost_s - fused_s)), min(high, 0.9 * max(0.0, cost_s - fused_s)))
            what = f"the traffic of one fused kernel would take about {fused_s * 1e3:.2f} ms"
            other = "" if compiling_failed(evidence) else ", or torch.compile this function"
            edit = f"use torch's own function for the formula if there is one{other}"
        yield Finding(
            where=evidence.source_of(max(by_line, key=lambda s: operator_seconds(evidence, by_line[s]))),
            cost_s=cost_s,
            saved_s=saved_s,
            because=f"{num} pointwise operators and reductions in a row take {cost_s * 1e3:.2f} ms a step; {what}",
            edit=edit,
            also=evidence.sources_of(by_line),
            module=evidence.operators[rows[0]].module,
            operators=tuple(rows),
            basis="trial" if result is not None else "estimate",
        )


def _chains(evidence: Evidence) -> Iterator[list[int]]:
    """Rows of each function that holds enough pointwise operators, its lines' backward included."""
    # Backward operators that are known by the line that starts the backward alone are of any forward.
    anywhere = set(evidence.backward_sources)
    pointwise = [
        i
        for i, o in enumerate(evidence.operators)
        if o.source >= 0 and _is_pointwise(o) and not (o.phase == "backward" and o.source in anywhere)
    ]
    function_of = function_finder(evidence)
    for rows in group_by(pointwise, lambda i: function_of(evidence.operators[i].source)).values():
        forward = [evidence.operators[i] for i in rows if evidence.operators[i].phase not in ("backward", "optimizer")]
        kinds = {(o.op, o.source) for o in forward}
        per_module = max((o.num_calls for o in forward), default=0.0)
        if len(kinds) >= _FEWEST and per_module < _MANY_CALLS and _is_connected(evidence, rows):
            yield rows


def _is_connected(evidence: Evidence, rows: list[int]) -> bool:
    """Whether enough of them feed one another directly, with nothing but views between: else no kernel could fuse them."""
    trace, operators = evidence.trace, evidence.operators
    inside = {i for i in rows if operators[i].phase != "backward"}
    passed: dict[int, frozenset[int]] = {}
    for call, row in enumerate(trace.operator):
        if row not in inside:
            continue
        # A chain that leaves the module and comes back (a residual stream) is not one kernel's work.
        mine = operators[row].module
        before = [
            passed[p] for p in trace.producers[call] if p in passed and operators[trace.operator[p]].module == mine
        ]
        passed[call] = frozenset({row}).union(*before)
    return max(map(len, passed.values()), default=0) >= _FEWEST


def _is_pointwise(operator: Operator) -> bool:
    """Whether it moves real numbers through arithmetic that a compiler fuses with what comes before and after."""
    return (
        operator.bytes > 0
        and operator.flop == 0
        and operator.phase != "optimizer"
        and _is_fusible(operator.op)
        and not any(t.dtype.startswith("complex") for t in operator.inputs + operator.outputs)
        and max((t.num_elements for t in operator.inputs), default=0) > 1
    )


def _is_fusible(op: str) -> bool:
    name = short_name(op)
    is_of_family = family_of(op) in _FUSIBLE_FAMILIES and not any(part in name for part in _NOT_FUSIBLE)
    return is_of_family or name in _ALSO_FUSIBLE


def _most_saved_s(evidence: Evidence, rows: list[int]) -> tuple[float, float]:
    """What compiling the module around the chain was found to save, which fuses the chain and more; endless where not tried."""
    main, result = main_call(evidence), compiled_result(evidence)
    if main is None or result is None or not isinstance(result.trial, TimeCompiled):
        return inf, inf
    name, regions = main[1].name, result.trial.regions if result.variant == "regions" else ()
    compiled = tuple(f"{name}.{path}." for path in regions) or (f"{name}.",)
    # Backward operators that torch could not match with forward ones belong to no module.
    forward = [o for o in (evidence.operators[i] for i in rows) if o.phase != "backward"]
    is_inside = all(f"{o.module}.".startswith(compiled) for o in forward)
    return PricedCure.of(evidence, main, result).saved_s if is_inside else (inf, inf)


def _trial_of(evidence: Evidence, rows: list[int]) -> TimeNormalisation | None:
    """The trial of a chain that takes a mean over the last dimension and divides by a root."""
    forward = [evidence.operators[i] for i in rows if evidence.operators[i].phase != "backward"]
    means = [o for o in forward if o.op in ("aten.mean", "aten.var", "aten.var_mean", "aten.std") and "-1" in o.scalars]
    if not means or not any(o.op in _ROOTS for o in forward):
        return None
    largest = max(means, key=lambda o: o.inputs[0].num_elements)
    is_layer = any(o.op in ("aten.sub", "aten.var", "aten.var_mean", "aten.std") for o in forward)
    return TimeNormalisation(
        kind="layer" if is_layer else "rms",
        shape=largest.inputs[0].shape,
        dtype=largest.inputs[0].dtype,
        backward=has_backward(evidence, rows),
    )


def _is_bandwidth_bound(machine: Machine, evidence: Evidence, rows: list[int]) -> bool:
    """Whether moving the largest tensor once in and once out takes longer than calling an operator does."""
    largest = max((t for i in rows for t in evidence.operators[i].inputs), key=lambda t: t.num_elements)
    floor = operation_floor(machine, flop=0, traffic_bytes=8 * largest.num_elements, dtype="float32")
    return floor.bandwidth_s > 2 * (machine.dispatch_grad_s or 0.0)


def _fused_s(machine: Machine, evidence: Evidence, rows: list[int]) -> float:
    """Seconds of one fused kernel forward and one backward, by traffic and dispatch; random numbers are drawn in it too."""
    operators = [evidence.operators[i] for i in rows]
    largest = max((t for o in operators for t in o.inputs), key=lambda t: t.num_elements)
    calls = max(sum(o.num_calls for o in group) for group in group_by(operators, lambda o: (o.op, o.source)).values())
    passes = sum(_FUSED_PASSES) if any(o.phase == "backward" for o in operators) else _FUSED_PASSES[0]
    floor = operation_floor(machine, flop=0, traffic_bytes=4 * largest.num_elements * passes, dtype="float32")
    drawn_s = sum(o.op_s for o in operators if short_name(o.op) in _DRAWS)
    return drawn_s + calls * (floor.floor_s + 3 * (floor.overhead_s or 0.0))


RULE = rule(
    __name__,
    check,
    propose=propose,
    title="A chain of pointwise operators that one kernel would do",
    rewrites_line=True,
)
