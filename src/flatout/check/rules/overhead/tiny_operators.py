"""The step is bound by overhead: its operators are so small that dispatching them takes longer than their work.

Costs        Host time for each operator, whatever its size.
Evidence     The mean operator is short beside the measured cost of dispatching one, or most of the step goes to products that
             read large weights for a few rows. Trial: the model's forward and backward on its batch repeated 2 and 8 times; if
             that takes hardly longer, the batch is too small.
Levers       parallelism.batch-size, graph.compile, graph.capture-update, graph.capture
False alarm  Large operators between small ones; a batch that cannot grow (streaming inference, all the data in one batch).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from flatout.core.parts import rule
from flatout.core.records.evidence import Evidence
from flatout.core.records.finding import Finding
from flatout.core.records.trial import TimeModel
from flatout.machine.cost.accounting import main_model, model_seconds, remaining_fraction, result_of
from flatout.machine.cost.iterations import reads_what_was_there_before

_FACTORS = (4, 8)
_DISPATCHES = 100.0
"""A step whose mean operator takes longer than so many dispatches is not worth a trial."""
_PRODUCTS = ("aten.mm", "aten.addmm", "aten.convolution", "aten.convolution_backward")
_THIN_FLOP_PER_BYTE = 4.0
"""A float32 product of 8 rows with a large matrix does 4 FLOP for each byte; memory gives no machine's units enough "
"to do then."""
_WEIGHT_BOUND = 0.4
_PER_SAMPLE: Final = ("data", "environment", "rollout", "no_grad", "evaluation")
"""Phases that take so many times longer with so many times the samples."""
_MOST_KEPT = 0.62
"""With four times the batch a sample must take at most this share of its time; else the operators themselves are at work."""


def propose(evidence: Evidence) -> Iterator[TimeModel]:
    """Yield a trial that repeats the batch."""
    model = main_model(evidence)
    if model is not None and _is_suspicious(evidence):
        for factor in _FACTORS:
            backward = evidence.models[model].num_graphs_used > 0
            yield TimeModel(model=model, variant="batched", backward=backward, factor=factor)


def check(evidence: Evidence) -> Iterator[Finding]:
    """Yield one finding for the step."""
    model = main_model(evidence)
    measured = [r for t in propose(evidence) if (r := result_of(evidence, t)) is not None]
    if model is None or len(measured) < len(_FACTORS) or remaining_fraction(measured[0]) > _MOST_KEPT:
        return
    if reads_what_was_there_before(evidence):
        return  # the batch is all the data there is: it cannot grow
    whole_s, busy_s = evidence.steps.whole_s, model_seconds(evidence)
    per_sample_s = sum(evidence.steps.phases.get(phase, 0.0) for phase in _PER_SAMPLE)
    rest_s = max(0.0, whole_s - busy_s - per_sample_s)
    saved = [
        busy_s * (1 - remaining_fraction(r)) + rest_s * (1 - 1 / f) for r, f in zip(measured, _FACTORS, strict=True)
    ]
    num = _num_operators(evidence)
    yield Finding(
        where=evidence.source_of(evidence.models[model].source),
        cost_s=max(0.0, *saved),
        saved_s=(max(0.0, min(saved)), max(0.0, *saved)),
        because=f"{num:.0f} operators a step, {whole_s / num * 1e6:.0f} us each with all around them; the batch repeated "
        f"{_FACTORS[1]} times takes {remaining_fraction(measured[1]) * _FACTORS[1]:.1f} times as long (tried)",
        edit=f"{_how_to_grow(evidence)} (up to {_FACTORS[1]}x; the learning rate with it), or torch.compile the model",
        basis="trial",
        advice=f"with up to {_FACTORS[1]} times the batch, which changes the experiment",
    )


def _how_to_grow(evidence: Evidence) -> str:
    """The change that brings more samples into a step, by where they come from."""
    if evidence.steps.phases.get("environment", 0.0) > 0:
        return "raise the batch size, or, where the environments hand out what is one batch, their number"
    return "raise the batch size"


def _num_operators(evidence: Evidence) -> float:
    return sum(o.num_calls for o in evidence.operators if o.bytes)


def _is_suspicious(evidence: Evidence) -> bool:
    """Whether the mean operator, with all around it, takes no more than some tens of dispatches."""
    num = _num_operators(evidence)
    if evidence.steps.is_device_bound or not num:
        return False
    dispatch_s = evidence.machine.dispatch_s if evidence.machine is not None else 2e-6
    return evidence.steps.step_s / num < _DISPATCHES * dispatch_s or _is_weight_bound(evidence)


def _is_weight_bound(evidence: Evidence) -> bool:
    """Whether products that do little with each byte they read take much of the step: a larger batch reads the weights once."""
    thin_s = sum(
        o.total_s
        for o in evidence.operators
        if o.op in _PRODUCTS and 0 < o.flop < _THIN_FLOP_PER_BYTE * max(1, o.bytes)
    )
    return thin_s > _WEIGHT_BOUND * evidence.steps.step_s


RULE = rule(__name__, check, propose=propose, is_general=True, title="The step is bound by overhead")
