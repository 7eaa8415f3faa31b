"""How good outputs are, one number a held sample, so that two models can be compared sample by sample."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flatout.core.errors import UsageError
from flatout.shrink.distil.losses import IGNORED
from flatout.shrink.distil.samples import Inputs, as_tuple, in_order
from flatout.shrink.distil.teachers import output_of
from flatout.shrink.module_mode import in_mode

Score = Callable[[Tensor, Tensor], Tensor]
"""(outputs, targets) of a batch -> [B], one number a sample; higher is better."""


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """1 where the largest of the outputs [B, V] is the target [B], else 0; of outputs [B, ..., V] the share of right places.

    >>> accuracy(torch.tensor([[0.0, 1.0], [0.0, 1.0]]), torch.tensor([1, 0])).tolist()
    [1.0, 0.0]
    """
    _check(outputs, targets)
    return _by_sample((outputs.argmax(-1) == targets).float(), targets != IGNORED)


def negative_bits(outputs: Tensor, targets: Tensor) -> Tensor:
    """Minus the cross entropy in bits a place: of logits [B, ..., V] and classes [B, ...], mean over a sample's places."""
    _check(outputs, targets)
    losses = F.cross_entropy(outputs.flatten(0, -2), targets.flatten(), ignore_index=IGNORED, reduction="none")
    return _by_sample(-losses.view(targets.shape) / math.log(2), targets != IGNORED)


def negative_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """Minus the mean squared error, for a regression."""
    return -(outputs - targets).square().flatten(1).mean(1)


def scores_of(
    model: nn.Module, inputs: Inputs, targets: Tensor, *, score: Score = accuracy, batch_size: int = 256
) -> list[float]:
    """Scores of every sample in order, in evaluation mode and without gradients; the model's modes are put back."""
    found: list[float] = []
    with in_mode(model, is_training=False), torch.no_grad():
        for batch in in_order(inputs, targets, batch_size=batch_size):
            assert batch.targets is not None and batch.ids is not None
            own = score(output_of(model(*as_tuple(batch.inputs))), batch.targets)
            if own.shape != (len(batch.ids),):
                raise UsageError(
                    f"the score is {tuple(own.shape)}; it must be one number for each of {len(batch.ids)} samples"
                )
            found += own.double().tolist()
    return found


def _by_sample(values: Tensor, counted: Tensor) -> Tensor:
    if values.dim() == 1:
        return values
    masked = torch.where(counted, values, 0.0)
    return masked.flatten(1).sum(1) / counted.flatten(1).sum(1).clamp_min(1)


def _check(outputs: Tensor, targets: Tensor) -> None:
    if targets.shape != outputs.shape[:-1]:
        raise UsageError(
            f"targets {tuple(targets.shape)} do not fit outputs {tuple(outputs.shape)}; give a score of your own"
        )
