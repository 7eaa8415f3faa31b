"""Every call computes again what the calls before have computed for the same beginning.

Costs        Generating T tokens costs T whole passes over ever longer inputs: quadratic where it could be linear.
Evidence     A model called again and again on the input of the call before and one piece more, without gradients. Trial: the same
             model on the last position alone.
Levers       graph.key-value-cache
False alarm  Models in which the beginning depends on what comes after it (no causal mask): there nothing can be kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from flatout.core.parts import rule
from flatout.core.records.evidence import Evidence, Model
from flatout.core.records.finding import Finding
from flatout.core.records.trial import TimeModel
from flatout.machine.cost.accounting import forward_seconds, result_of

_FEWEST: Final = 3
_SHARE: Final = 0.7
_CACHE_FACTOR: Final = (1.0, 1.6)
"""A pass over one position with a cache costs what the trial's does, and the reading and writing of the cache."""


def propose(evidence: Evidence) -> Iterator[TimeModel]:
    """Time each such model on one position."""
    for index, model in enumerate(evidence.models):
        if _grows(model):
            yield _trial(index, model)


def check(evidence: Evidence) -> Iterator[Finding]:
    """Yield one finding per model and line."""
    for index, model in enumerate(evidence.models):
        result = result_of(evidence, _trial(index, model)) if _grows(model) else None
        if result is None or result.cured_s is None:
            continue
        # Once the window slides, nothing of the call before can be kept.
        cost_s = forward_seconds(evidence, model) * model.num_prefix_calls / model.num_compared_calls
        calls = cost_s / model.call_s if model.call_s else 0.0
        saved = [max(0.0, cost_s - calls * result.cured_s * factor) for factor in _CACHE_FACTOR]
        yield Finding(
            where=evidence.source_of(model.source),
            cost_s=cost_s,
            saved_s=(0.8 * saved[1], saved[0]),
            because=f"{model.name} is called on the input of the call before and one piece more ({model.num_prefix_calls} of "
            f"{model.num_compared_calls} calls compared), {model.call_s * 1e3:.2f} ms a call; one position alone takes "
            f"{result.cured_s * 1e3:.2f} ms (tried)",
            edit="keep keys and values (or the recurrent state) of the positions already seen, and pass only the new one, "
            "as long as the text fits into the context: when its window slides, all positions are new",
            phases=("forward",),
            basis="trial",
        )


def _grows(model: Model) -> bool:
    return (
        model.num_graphs_used == 0
        and model.num_prefix_calls >= _FEWEST
        and model.num_prefix_calls >= _SHARE * model.num_compared_calls
        and model.captured_length > 1
    )


def _trial(index: int, model: Model) -> TimeModel:
    return TimeModel(model=index, variant="cropped", backward=False, length=model.captured_length, cropped_length=1)


RULE = rule(__name__, check, propose=propose, title="What earlier calls computed is computed again", rewrites_line=True)
