"""Blocks that a model does without best go, and the rest is what it was with them as the identity."""

from __future__ import annotations

import pytest
import torch
from tests.plain_models import Plain, Transformer, plain
from torch import Tensor, nn

from flatout.core.errors import PlanError, UsageError
from flatout.shrink.prune import apply_pruning, drop_blocks


def test_the_block_that_does_least_goes() -> None:
    case = Plain(Transformer(32, blocks=3), plain("transformer").inputs)
    with torch.no_grad():
        for part in (case.module.blocks[1].out, case.module.blocks[1].down):
            part.weight.mul_(1e-3)
            part.bias.zero_()

    pruned = drop_blocks(case.module, case.inputs)

    assert pruned.plan.dropped == ("blocks.1",)
    assert len(pruned.model.blocks) == 2 and len(case.module.blocks) == 3
    assert pruned.report.num_parameters < pruned.report.num_parameters_before
    assert {b.name for b in pruned.report.blocks if b.is_dropped} == {"blocks.1"}
    torch.testing.assert_close(pruned.model(*case.inputs), case.module(*case.inputs), atol=1e-2, rtol=1e-2)
    assert torch.equal(apply_pruning(case.module, pruned.plan)(*case.inputs), pruned.model(*case.inputs))


def test_a_loss_ranks_where_it_is_given() -> None:
    case = plain("transformer")
    y = case.inputs[0].roll(-1, 1)

    def loss(model: nn.Module, batch: object) -> Tensor:
        return nn.functional.cross_entropy(model(batch).transpose(1, 2), y)

    report = drop_blocks(case.module, case.inputs, batches=case.inputs, loss=loss).report

    assert min(report.blocks, key=lambda b: b.effect).is_dropped


def test_layers_whose_results_are_added_to_are_refused() -> None:
    class Adds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = x + layer(x)
            return x

    with pytest.raises(PlanError, match=r"without layers\.\d does not give"):
        drop_blocks(Adds(), (torch.randn(2, 4),))


def test_more_blocks_than_there_are_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match="3 blocks are to go, Transformer has 2"):
        drop_blocks(plain("transformer").module, plain("transformer").inputs, num=3)
