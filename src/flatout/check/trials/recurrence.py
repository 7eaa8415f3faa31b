"""A recurrent cell called step by step, against torch's layer over the whole sequence."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor, nn

from flatout.check.trials.context import Scene, TrialEntry, random_tensor
from flatout.check.trials.timing import largest_relative_error, timed_passes
from flatout.core.records.trial import TimeRecurrence, TrialResult


def run(trial: TimeRecurrence, scene: Scene) -> TrialResult:
    """A cell called step by step, against torch's layer over the sequence with the same weights."""
    # B batch, T steps, I input size, H hidden size
    cell: nn.RNNCellBase = getattr(nn, trial.cell)(trial.input_size, trial.hidden_size, device=scene.device)
    layer: nn.RNNBase = getattr(nn, trial.cell.removesuffix("Cell"))(
        trial.input_size, trial.hidden_size, batch_first=True, device=scene.device
    )
    with torch.no_grad():
        for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
            getattr(layer, f"{name}_l0").copy_(getattr(cell, name))
    x_BTI = random_tensor((trial.batch, trial.steps, trial.input_size), torch.float32, device=scene.device)
    is_lstm = trial.cell == "LSTMCell"

    def stepwise() -> Tensor:
        state = None
        outputs = []
        for t in range(trial.steps):
            state = cell(x_BTI[:, t], state)
            outputs.append(state[0] if is_lstm else state)
        return torch.stack(outputs, dim=1)

    def whole() -> Tensor:
        output: Tensor = layer(x_BTI)[0]
        return output

    error = largest_relative_error(stepwise, whole)
    parameters = (*cell.parameters(), *layer.parameters())
    return timed_passes(trial, stepwise, whole, scene, inputs=parameters, backward=trial.backward, error=error)


TRIAL: Final = TrialEntry(TimeRecurrence, run)
