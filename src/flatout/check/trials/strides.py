"""A copy and the operator that reads it, against that operator on the strided original."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from flatout.check.trials.context import Refused, Scene, TrialEntry
from flatout.check.trials.replay import fresh_argument, fresh_arguments
from flatout.check.trials.timing import timed_trial
from flatout.core.records.trial import TimeStrides, TrialResult


def run(trial: TimeStrides, scene: Scene) -> TrialResult:
    """A copy and its reader, and the reader on what was copied."""
    copy, reader = scene.examples[trial.copy], scene.examples[trial.reader]
    if copy is None or reader is None:
        raise Refused("the call was not captured")
    source = fresh_argument(copy.args[0], scene)
    if not isinstance(source, Tensor):
        raise Refused("what was copied is no tensor")
    args, kwargs = fresh_arguments(reader, scene)
    positions = [i for i, a in enumerate(args) if isinstance(a, Tensor)]
    position = positions[trial.argument]
    if args[position].shape != source.shape:
        raise Refused("the copy reaches its reader through a view")

    def now() -> object:
        with torch.no_grad():
            args[position] = source.clone(memory_format=torch.contiguous_format)
            return reader.func(*args, **kwargs)

    direct = [source if i == position else a for i, a in enumerate(args)]

    def cured() -> object:
        with torch.no_grad():
            return reader.func(*direct, **kwargs)

    return timed_trial(trial, now, cured, scene)


TRIAL: Final = TrialEntry(TimeStrides, run)
