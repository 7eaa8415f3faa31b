"""Bytes that operators must move, asked of the operators that really run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from flatout.machine.cost.traffic import operator_traffic

TABLE = torch.randn(10_000, 16)
ROWS = torch.tensor([3, 1, 4, 1, 5])
WHERE = ROWS[:, None].expand(5, 16).contiguous()
PART, INDEX = 5 * 16 * 4, 5 * 8


class TrafficRecorder(TorchDispatchMode):
    """Adds up the traffic of all that is dispatched."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        flat = [v for a in args for v in (a if isinstance(a, list) else [a])]
        sizes = [[v.nbytes for v in values if isinstance(v, Tensor)] for values in (flat, [result])]
        self.bytes += operator_traffic(str(func), *sizes)
        return result


@pytest.mark.parametrize(
    ("run", "num_bytes"),
    [
        (lambda: TABLE[ROWS], 2 * PART + INDEX),
        (lambda: F.embedding(ROWS, TABLE), 2 * PART + INDEX),
        (lambda: TABLE.index_select(0, ROWS), 2 * PART + INDEX),
        (lambda: TABLE.gather(0, WHERE), 2 * PART + WHERE.nbytes),
        (lambda: TABLE.index_add_(0, ROWS, torch.ones(5, 16)), 3 * PART + INDEX + PART),
        (lambda: TABLE.scatter_add_(0, WHERE, torch.ones(5, 16)), 3 * PART + WHERE.nbytes + PART),
        (TABLE.zero_, TABLE.nbytes),
        (lambda: TABLE.copy_(TABLE), 2 * TABLE.nbytes),
        (lambda: TABLE.add(TABLE), 3 * TABLE.nbytes),
        (lambda: TABLE.mul_(TABLE), 3 * TABLE.nbytes),
    ],
    ids=["index", "embedding", "index_select", "gather", "index_add_", "scatter_add_", "zero_", "copy_", "add", "mul_"],
)
def test_rows_that_are_not_touched_do_not_move(run: Callable[[], object], num_bytes: int) -> None:
    with TrafficRecorder() as recorder:
        run()
    assert recorder.bytes == num_bytes
