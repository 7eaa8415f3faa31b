"""A trained model with its data and its metric, as a user of `flatout shrink` has them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from tests.plain_tasks import digits
from torch import Tensor, nn

TASK = digits(is_image=False)


def make() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """An MLP that is wider than digits need, and one digit."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    for _ in range(8):
        for x, y in data():
            optimizer.zero_grad()
            loss(model(x), y).backward()
            optimizer.step()
    return model.eval(), (TASK.held_x[:1],)


def data() -> Iterator[tuple[Tensor, Tensor]]:
    return ((TASK.x[i : i + 100], TASK.y[i : i + 100]) for i in range(0, 1200, 100))


def score(call: Callable[[Tensor], Tensor]) -> Tensor:
    return (call(TASK.held_x).argmax(-1) == TASK.held_y).float()


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets)
