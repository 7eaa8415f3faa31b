"""A loop over parameters, replayed tensor by tensor and with torch's foreach functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from flatout.check.observe.operators.recorder import signature_of
from flatout.check.trials.context import Refused, Scene, TrialEntry
from flatout.check.trials.replay import fresh_arguments
from flatout.check.trials.timing import timed_trial
from flatout.core.records.trial import TimeForeach, TrialResult
from flatout.machine.cost.accounting import group_by

_NAMES: Final = {"aten.linalg_vector_norm": "_foreach_norm", "aten.norm": "_foreach_norm"}
_MOST_CALLS: Final = 5000


class ReplayedCall(NamedTuple):
    """One call of the loop."""

    name: str
    func: Callable[..., object]
    args: list[Any]
    kwargs: dict[str, Any]


def run(trial: TimeForeach, scene: Scene) -> TrialResult:
    """Seconds of all calls of a step one by one, and with equal operators gathered; part 'gathered' is the share that can be."""
    calls = []
    for index in trial.operators:
        example = scene.examples[index]
        if example is None:
            continue
        name = signature_of(example.func).name
        for _ in range(max(1, round(scene.num_calls[index]))):
            args, kwargs = fresh_arguments(example, scene)
            calls.append(ReplayedCall(name, example.func, args, kwargs))
    if not calls or len(calls) > _MOST_CALLS:
        raise Refused(f"{len(calls)} calls cannot be replayed")
    one_by_one = [partial(c.func, *c.args, **c.kwargs) for c in calls]
    cured = [action for group in _grouped(calls) for action in _actions(group)]
    _run(cured)
    parts = {"gathered": 1 - len(cured) / len(calls)}
    return timed_trial(trial, partial(_run, one_by_one), partial(_run, cured), scene, parts=parts)


@torch.no_grad()
def _run(actions: Sequence[Callable[[], object]]) -> None:
    for action in actions:
        action()


def _grouped(calls: list[ReplayedCall]) -> list[list[ReplayedCall]]:
    """Calls of one operator with the same plain arguments, in order of first appearance."""

    def kind(call: ReplayedCall) -> tuple[str, str]:
        return call.name, repr([a for a in call.args if not isinstance(a, Tensor)]) + repr(call.kwargs)

    return list(group_by(calls, kind).values())


def _actions(calls: list[ReplayedCall]) -> list[Callable[[], object]]:
    """One foreach call for them all where torch has it, else the calls themselves."""
    name = calls[0].name
    function = getattr(torch, _NAMES.get(name, "_foreach_" + name.removeprefix("aten.")), None)
    first = calls[0]
    if function is not None and len(calls) > 1:
        args = [
            [c.args[i] for c in calls] if isinstance(a, Tensor) else a
            for i, a in enumerate(first.args)
            if not (isinstance(a, list) and not a)
        ]
        args, kwargs = _without_small(args), first.kwargs
        try:
            function(*args, **kwargs)
        except (RuntimeError, TypeError):
            pass
        else:
            return [partial(function, *args, **kwargs)]
    return [partial(c.func, *c.args, **c.kwargs) for c in calls]


def _without_small(args: list[Any]) -> list[Any]:
    """A tensor of one number that goes with every other (a clip's scale) is passed once, as foreach functions want it."""
    return [args[0], *(a[0] if isinstance(a, list) and a[0].dim() == 0 else a for a in args[1:])]


TRIAL: Final = TrialEntry(TimeForeach, run)
