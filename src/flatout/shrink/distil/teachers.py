"""Sources of a teacher's outputs (the model itself, or a cache), and how far a student's are from them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from flatout.core.errors import UsageError
from flatout.shrink.distil.losses import IGNORED, hard_loss, logit_loss
from flatout.shrink.distil.samples import Batch, as_tuple

Hard = Callable[[Tensor, Tensor], Tensor]
"""(outputs, targets) -> a loss of no dimension."""
Soft = Callable[[Tensor, Tensor], Tensor]
"""(student's outputs, teacher's) -> a loss of no dimension."""


class DistilObjective(NamedTuple):
    """`soft_fraction` * loss against the teacher + the rest * loss against the targets + `feature_weight` * loss of features.

    Without targets the teacher alone counts. `soft` stands in for the loss on logits, with `temperature` left aside: for a
    regression give `torch.nn.functional.mse_loss`, for `hard` too. Places whose target is -100 do not count in either.
    """

    temperature: float = 2.0
    soft_fraction: float = 0.7
    feature_weight: float = 1.0
    soft: Soft | None = None
    hard: Hard | None = None

    def of_targets(self, outputs: Tensor, targets: Tensor | None) -> Tensor:
        """The loss against the targets; zero without."""
        if targets is None:
            return outputs.new_zeros(())
        return (self.hard or hard_loss)(outputs, targets)

    def of_outputs(self, outputs: Tensor, goal: Tensor, targets: Tensor | None) -> Tensor:
        """The loss against a teacher's outputs."""
        if self.soft is not None:
            return self.soft(outputs, goal)
        return logit_loss(outputs, goal, temperature=self.temperature, counted=self.counted(outputs, targets))

    def counted(self, outputs: Tensor, targets: Tensor | None) -> Tensor | None:
        """Mask of the places of the outputs that count; None: all do."""
        is_of_classes = self.hard is None and targets is not None and targets.shape == outputs.shape[:-1]
        return targets != IGNORED if is_of_classes and targets is not None else None

    def checked(self) -> DistilObjective:
        """Itself. Raises UsageError for values out of range."""
        if not self.temperature > 0 or not 0 <= self.soft_fraction <= 1 or not self.feature_weight >= 0:
            raise UsageError(
                f"temperature {self.temperature:g}, soft_fraction {self.soft_fraction:g}, feature_weight "
                f"{self.feature_weight:g}: give one above 0, one in 0..1, and one of 0 or more"
            )
        return self


class Teacher(Protocol):
    """Tells how far a student's outputs for a batch are from its own."""

    def loss(self, outputs: Tensor, batch: Batch, objective: DistilObjective) -> Tensor:
        """The loss of a batch, a scalar that is differentiable in the outputs."""


class LiveTeacher:
    """A model in evaluation mode, without gradients; its mode is put back by `teaching`."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def loss(self, outputs: Tensor, batch: Batch, objective: DistilObjective) -> Tensor:
        """Runs the model on the batch."""
        with torch.no_grad():
            goal = output_of(self.module(*as_tuple(batch.inputs)))
        return objective.of_outputs(outputs, goal, batch.targets)


def output_of(found: object) -> Tensor:
    """The tensor that is judged: the output, or the first of several. Raises UsageError for another kind."""
    first = found[0] if isinstance(found, (tuple, list)) and found else found
    if not isinstance(first, Tensor):
        raise UsageError(
            f"the model returns a {type(first).__name__}; a tensor, or a tuple that begins with one, can be distilled; wrap the "
            "model in a module that returns its logits"
        )
    return first
