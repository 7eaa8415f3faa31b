"""A model is asked for one sample at a time, though many lie at hand.

Costs        For each sample the dispatch of every operator, and reading all weights from memory once.
Evidence     An inference loop whose calls get batches of one. Trial: the call on its input repeated 2 and 8 times, by the time of
             one sample.
Levers       parallelism.batch-size
False alarm  Samples that arrive one by one and must be answered at once (streaming, an environment that waits for an action);
             samples of different shapes; a model that takes eight times as long for eight; generation, where each call's input
             holds what the call before gave: a sequence that grows, a state that the call's line passes and assigns, or indices
             that are written after the call from what it gave.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Final

from flatout.core.parts import rule
from flatout.core.records.evidence import Evidence, TensorSpec
from flatout.core.records.finding import Finding
from flatout.core.records.trial import TimeModel
from flatout.machine.cost.accounting import remaining_fraction, result_of
from flatout.machine.cost.iterations import READ

_FACTORS = (2, 8)
_MOST_KEPT = 0.85
_MOSTLY_GROWS: Final = 0.5
"""Share of the compared calls whose input is the one before with more behind it, from which on a sequence is generated."""
_JOINS: Final = ("aten.cat", "aten.copy_", "aten.fill_", "aten.index_put_")
_FROM_A_NUMBER: Final = ("aten.fill_", "aten.lift_fresh", "aten.full")


def propose(evidence: Evidence) -> Iterator[TimeModel]:
    """Yield a trial that repeats the sample."""
    model = _model(evidence)
    if model is not None:
        for factor in _FACTORS:
            yield TimeModel(model=model, variant="batched", backward=False, factor=factor)


def check(evidence: Evidence) -> Iterator[Finding]:
    """Yield one finding for the loop."""
    model = _model(evidence)
    results = [r for t in propose(evidence) if (r := result_of(evidence, t)) is not None]
    if model is None or len(results) < len(_FACTORS) or remaining_fraction(results[0]) > _MOST_KEPT:
        return
    call_s = evidence.steps.phases.get("forward", 0.0)
    saved = [call_s * (1 - remaining_fraction(r)) for r in results]
    calls = evidence.models[model].calls
    yield Finding(
        regime="overhead",
        where=evidence.source_of(evidence.models[model].source),
        cost_s=max(0.0, *saved),
        saved_s=(max(0.0, min(saved)), max(0.0, *saved)),
        because=f"{max(1.0, calls):.0f} call(s) a step with one sample each; eight at once take "
        f"{remaining_fraction(results[1]) * _FACTORS[1]:.1f} times as long as one (tried)",
        edit="collect the samples and call the model on batches of 8 or more; sort by shape and pad where shapes differ",
        phases=("forward",),
        basis="trial",
    )


def _model(evidence: Evidence) -> int | None:
    """The model that an inference loop calls with one sample at a time."""
    if evidence.steps.kind != "inference" or not evidence.models:
        return None
    model = max(range(len(evidence.models)), key=lambda i: evidence.models[i].call_s * evidence.models[i].calls)
    is_one_by_one = evidence.models[model].batch_size == 1
    return model if is_one_by_one and not _needs_the_call_before(evidence, model) else None


def _needs_the_call_before(evidence: Evidence, index: int) -> bool:
    """Whether the next input of the model is made of what it just gave."""
    model = evidence.models[index]
    if evidence.steps.phases.get("environment", 0.0):
        return True
    if model.num_compared_calls and model.num_prefix_calls >= _MOSTLY_GROWS * model.num_compared_calls:
        return True
    line = evidence.source_of(model.source)
    return _passes_a_state(line.text if line is not None else "") or _writes_next_input(evidence, model.name)


def _passes_a_state(text: str) -> bool:
    """Whether a line passes a state and assigns it, beside other things: `output, hidden = model(input, hidden)`.

    `x = model(x)` alone may be a loop's own variable.
    """
    try:
        statement = ast.parse(text).body[0] if text else None
    except SyntaxError:  # the first line of a longer statement
        return False
    if not isinstance(statement, ast.Assign) or not isinstance(statement.value, ast.Call):
        return False
    target, call = statement.targets[0], statement.value
    arguments = [*call.args, *(k.value for k in call.keywords)]
    if not isinstance(target, ast.Tuple) or len(arguments) < 2:
        return False
    passed = {n.id for argument in arguments for n in ast.walk(argument) if isinstance(n, ast.Name)}
    return any(n.id in passed for n in ast.walk(target) if isinstance(n, ast.Name))


def _writes_next_input(evidence: Evidence, name: str) -> bool:
    """Whether a tensor like the model's input of indices is written or extended after the call with what the model gave.

    A step ends where the model is called again, so the trace shows how the next input is made but not that it is read. Tensors
    of integers from before the step are inputs; of floating-point ones parameters and inputs look alike.
    """
    trace, operators = evidence.trace, evidence.operators
    indices: set[TensorSpec] = set()
    from_output: set[int] = set()
    is_read = False
    for call, row in enumerate(trace.operator):
        operator, producers = operators[row], trace.producers[call]
        specs = list(zip(operator.inputs, producers, strict=False))
        if f"{operator.module}.".startswith(f"{name}."):
            from_output.add(call)
            indices |= {spec for spec, producer in specs if producer < 0 and "int" in spec.dtype}
            continue
        follows_output = any(p in from_output for p in producers)
        if follows_output:
            from_output.add(call)
            is_read |= operator.op == READ
        if operator.op in _JOINS and follows_output and any(p < 0 and spec in indices for spec, p in specs):
            return True
        # A single index, made from a number after one was read of what the model gave.
        if is_read and operator.op in _FROM_A_NUMBER and any(_is_like(operator.outputs, spec) for spec in indices):
            return True
    return False


def _is_like(outputs: tuple[TensorSpec, ...], index: TensorSpec) -> bool:
    """Whether an operator gave one index, as this input is one."""
    return index.num_elements == 1 and any(t.dtype == index.dtype and t.num_elements == 1 for t in outputs)


RULE = rule(__name__, check, propose=propose, title="The model is asked for one sample at a time")
