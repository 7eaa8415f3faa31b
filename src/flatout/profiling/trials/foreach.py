"""A loop over parameters, replayed tensor by tensor and with torch's foreach functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from flatout.profiling.trials.calls import foreach_arguments, timed
from flatout.profiling.trials.scene import Refused, Scene
from flatout.records.trial import TimeForeach, TrialResult

_NAMES: Final = {"aten.linalg_vector_norm": "_foreach_norm", "aten.norm": "_foreach_norm"}
_MOST_CALLS: Final = 5000


class Call(NamedTuple):
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
        name = f"{example.func.namespace}.{example.func._schema.name.partition('::')[2]}"  # type: ignore[attr-defined]
        for _ in range(max(1, round(scene.num_calls[index]))):
            args, kwargs = foreach_arguments(example, scene)
            calls.append(Call(name, example.func, args, kwargs))
    if not calls or len(calls) > _MOST_CALLS:
        raise Refused(f"{len(calls)} calls cannot be replayed")
    cured = [action for group in _grouped(calls) for action in _actions(group)]
    with torch.no_grad():
        for action in cured:
            action()

    def one_by_one() -> None:
        with torch.no_grad():
            for call in calls:
                call.func(*call.args, **call.kwargs)

    def gathered() -> None:
        with torch.no_grad():
            for action in cured:
                action()

    return timed(trial, one_by_one, gathered, scene, parts={"gathered": 1 - len(cured) / len(calls)})


def _grouped(calls: list[Call]) -> list[list[Call]]:
    """Calls of one operator with the same plain arguments, in order of first appearance."""
    groups: dict[tuple[str, str], list[Call]] = {}
    for call in calls:
        plain = repr([a for a in call.args if not isinstance(a, Tensor)]) + repr(call.kwargs)
        groups.setdefault((call.name, plain), []).append(call)
    return list(groups.values())


def _actions(calls: list[Call]) -> list[Callable[[], object]]:
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
        kwargs = first.kwargs
        args = _without_small(args)
        try:
            function(*args, **kwargs)
        except (RuntimeError, TypeError):
            pass
        else:
            return [lambda: function(*args, **kwargs)]
    return [_again(c) for c in calls]


def _without_small(args: list[Any]) -> list[Any]:
    """A tensor of one number that goes with every other (a clip's scale) is given once, as foreach functions want it."""
    return [args[0], *(a[0] if isinstance(a, list) and a[0].dim() == 0 else a for a in args[1:])]


def _again(call: Call) -> Callable[[], object]:
    return lambda: call.func(*call.args, **call.kwargs)
