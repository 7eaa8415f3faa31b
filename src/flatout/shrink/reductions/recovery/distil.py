"""A smaller model is trained to answer as the original one does.

What        `flatout.shrink.distil.distil`: AdamW with a cosine schedule for a stated time, after the original model's
            outputs and, where there are, the targets.
Guarantee   QUALITY: the metric tells.
Price       Time, a minute by default. What stays lost by models with half of their units, one seed, 95 % intervals paired by
            sample (`bench/distilling.py`, one thread of a Xeon): 0.3 points of accuracy on digits with an MLP of 128 (-0.6 to
            1.3), 0.2 with a CNN of 32 (-0.7 to 1.1), 0.003 bits a character of 1.780 with a transformer of 64 (-0.006 to 0.013),
            after 1.3, 4.9 and 57 seconds. By the targets alone: 0.3 points, 0.5 points, 0.025 bits, in 0.6 to 0.7 of the time.
            Not worth it where the targets bring as much back, as with the MLP.
Refuses     Runs without data; models whose weights are those that were given.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import TYPE_CHECKING

from flatout.core.errors import UsageError
from flatout.core.parts import reduction
from flatout.core.records.lever import Parameters
from flatout.core.records.reduction import Option, ReductionRefusal

if TYPE_CHECKING:
    from torch import nn

    from flatout.shrink.candidate import CandidateModel


def options(candidate: CandidateModel) -> Iterator[Option | ReductionRefusal]:
    """One option, for a model that other reductions made smaller."""
    if candidate.task.batches is None:
        yield ReductionRefusal(reduction=REDUCTION.id, because="there are no data to learn from; give --data")
    elif candidate.is_reduced:
        yield Option(
            reduction=REDUCTION.id, name="distil", because="training after the original model brings the metric back"
        )


def apply(candidate: CandidateModel, parameters: Parameters) -> CandidateModel:
    """Raises UsageError without data, or where outputs cannot be followed."""
    import torch.nn.functional as F

    from flatout.shrink.candidate import arguments
    from flatout.shrink.distil.distillation import Length, distil
    from flatout.shrink.distil.teachers import DistilObjective

    task = candidate.task
    if task.batches is None:
        raise UsageError("recovery.distil has no data to learn from; give --data")
    batches = [(arguments(inputs), targets) for inputs, targets in task.batches()]
    if not batches:
        raise UsageError("--data gives no batch")
    targets = batches[0][1]
    is_of_classes = targets is not None and not targets.is_floating_point()
    objective = DistilObjective(
        soft=None if is_of_classes else F.mse_loss, hard=task.loss or (None if is_of_classes else F.mse_loss)
    )
    student, teacher = (_over_events(model, candidate, own) for model, own in _pair(candidate))
    done = distil(
        student, teacher, batches, length=Length(seconds=task.recovery_s), objective=objective, seed=task.seed
    )
    trained = done.student.get_submodule("step") if task.num_state else done.student
    history = done.report.history
    note = f"distilled for {task.recovery_s:.0f} s: {history[-1].step} steps" if history else "distilled"
    return candidate.with_model(trained, note)


def _pair(candidate: CandidateModel) -> tuple[tuple[nn.Module, bool], tuple[nn.Module, bool]]:
    student = copy.deepcopy(candidate.model)
    for parameter in student.parameters():
        parameter.requires_grad_(True)
    return (student, True), (candidate.original, False)


def _over_events(model: nn.Module, candidate: CandidateModel, is_own: bool) -> nn.Module:
    """A model with a state as one over sequences [B, T, ...], as its data are."""
    from flatout.shrink.distil.rollouts import Rollout

    task = candidate.task
    if not task.num_state:
        return model
    inputs = candidate.inputs if is_own else task.inputs
    return Rollout(model, inputs[len(inputs) - task.num_state :])


REDUCTION = reduction(__name__, options, apply, title="Trained after the original model")
