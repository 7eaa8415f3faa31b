"""A smaller model is trained to answer as the given one does.

What        `flatout.compression.distilling.distil`: AdamW with a cosine schedule for a stated time, after the given model's
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

from flatout.errors import UsageError
from flatout.records.lever import Lever, Offer, Parameters, Reduction, Refusal

if TYPE_CHECKING:
    from torch import nn

    from flatout.levers.subjects import Subject


def offers(subject: Subject) -> Iterator[Offer | Refusal]:
    """To a model that others made smaller."""
    if subject.purpose.batches is None:
        yield Refusal(lever=LEVER.id, because="there are no data to learn from; give --data")
    elif subject.is_reduced:
        yield Offer(lever=LEVER.id, name="distil", because="training after the given model brings the metric back")


def apply(subject: Subject, parameters: Parameters) -> Subject:
    """Raises UsageError without data, or where outputs cannot be followed."""
    import torch.nn.functional as F

    from flatout.compression.distilling.distilled import Length, distil
    from flatout.compression.distilling.teachers import Objective
    from flatout.levers.subjects import arguments

    purpose = subject.purpose
    if purpose.batches is None:
        raise UsageError("workload.distil has no data to learn from; give --data")
    batches = [(arguments(inputs), targets) for inputs, targets in purpose.batches()]
    if not batches:
        raise UsageError("--data gives no batch")
    targets = batches[0][1]
    is_of_classes = targets is not None and not targets.is_floating_point()
    objective = Objective(
        soft=None if is_of_classes else F.mse_loss, hard=purpose.loss or (None if is_of_classes else F.mse_loss)
    )
    student, teacher = (_over_events(model, subject, own) for model, own in _pair(subject))
    done = distil(
        student, teacher, batches, length=Length(seconds=purpose.recovery_s), objective=objective, seed=purpose.seed
    )
    trained = done.student.get_submodule("step") if purpose.num_state else done.student
    history = done.report.history
    told = f"distilled for {purpose.recovery_s:.0f} s: {history[-1].step} steps" if history else "distilled"
    return subject.having(trained, told)


def _pair(subject: Subject) -> tuple[tuple[nn.Module, bool], tuple[nn.Module, bool]]:
    student = copy.deepcopy(subject.model)
    for parameter in student.parameters():
        parameter.requires_grad_(True)
    return (student, True), (subject.given, False)


def _over_events(model: nn.Module, subject: Subject, is_own: bool) -> nn.Module:
    """A model with a state as one over sequences [B, T, ...], as its data are."""
    from flatout.compression.distilling.rollouts import Rollout

    purpose = subject.purpose
    if not purpose.num_state:
        return model
    inputs = subject.inputs if is_own else purpose.inputs
    return Rollout(model, inputs[len(inputs) - purpose.num_state :])


LEVER = Lever(
    id="workload.distil",
    title="Trained after the given model",
    guarantee="quality",
    module=__name__,
    reduction=Reduction(kind="recovery", offers=offers, apply=apply),
)
