"""What becomes of a program besides its numbers: weights of 8 bits alone, and nothing that the model's later life changes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from flatout.blocks.inference.native.program import Program

pytestmark = pytest.mark.slow


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv1d(32, 64, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64 * 6, 32))


def test_products_in_8_bits_bring_no_float32_weights_along() -> None:
    program = Program.of(_model(), (torch.zeros(1, 32, 8),))
    plain, coarse = program.generated(), program.generated(precision={"0.weight": "int8", "3.weight": "int8"})
    assert [layer.precision for layer in coarse.layers] == ["int8", "int8"]
    assert len(coarse.weights) < 0.3 * len(plain.weights)


def test_training_goes_on_without_changing_the_program() -> None:
    model = _model().train()
    program = Program.of(model, (torch.zeros(1, 32, 8),))
    before = program.generated().weights
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    assert program.generated().weights == before
    assert model.training
