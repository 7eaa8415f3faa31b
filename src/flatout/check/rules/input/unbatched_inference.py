"""A model is asked for one sample at a time, though many lie at hand.

Costs        For each sample the dispatch of every operator, and reading all weights from memory once.
Evidence     An inference loop whose calls get batches of one. Trial: the call on its input repeated 2 and 8 times, by the time of
             one sample.
Levers       parallelism.batch-size
False alarm  Samples that arrive one by one and must be answered at once (streaming, an environment that waits for an action);
             samples of different shapes; a model that takes eight times as long for eight.
"""

from __future__ import annotations

from collections.abc import Iterator

from flatout.core.parts import rule
from flatout.core.records.evidence import Evidence
from flatout.core.records.finding import Finding
from flatout.core.records.trial import TimeModel
from flatout.machine.cost.accounting import remaining_fraction, result_of

_FACTORS = (2, 8)
_MOST_KEPT = 0.85


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
    return model if evidence.models[model].batch_size == 1 else None


RULE = rule(__name__, check, propose=propose, title="The model is asked for one sample at a time")
