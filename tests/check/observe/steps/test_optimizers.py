"""What is noted of an optimizer when it first steps."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from flatout.check.observe.steps.optimizers import OptimizerWatched


@pytest.mark.parametrize("is_sparse", [True, False])
def test_fused_kernels_take_no_sparse_gradients(is_sparse: bool) -> None:
    table = nn.Embedding(10, 4, sparse=is_sparse)
    optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
    table(torch.tensor([1, 2])).sum().backward()
    assert OptimizerWatched(optimizer, 0, 0).fused_supported is not is_sparse
    if is_sparse:
        with pytest.raises(RuntimeError, match="sparse"):
            fused = torch.optim.SGD(table.parameters(), lr=0.1, fused=True)
            fused.step()
