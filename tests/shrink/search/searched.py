"""A small search, for a process that is killed in the middle of it: `python searched.py STORAGE LOG NUM_BEFORE_SLEEP`."""

from __future__ import annotations

import sys
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flatout.core.records.architecture_search import SpaceValue
from flatout.shrink.search.costs import Limit
from flatout.shrink.search.search import SearchResult, search_architecture
from flatout.shrink.search.space import Range

SPACE = {"width": Range(2, 16, 2), "deep": [False, True]}
LIMIT = Limit(work_flop=2 * 32 * (8 * 12 + 12 * 2))


def samples(seed: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(200, 8, generator=torch.Generator().manual_seed(seed))
    return x, (x[:, 0] * x[:, 1] > 0).long()


def build(architecture: Mapping[str, SpaceValue]) -> nn.Module:
    width = int(architecture["width"])
    inner = {"inner": nn.Linear(width, width), "bend": nn.ReLU()} if architecture["deep"] else {}
    layers = {"into": nn.Linear(8, width), "first": nn.ReLU(), **inner, "head": nn.Linear(width, 2)}
    return nn.Sequential(OrderedDict(layers))


def steps(model: nn.Module, num: int) -> None:
    x, y = samples(0)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(num):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


def judged_by(seed: int) -> Any:
    x, y = samples(seed)
    return lambda model: (model(x).argmax(-1) == y).float()


def original() -> nn.Module:
    torch.manual_seed(0)
    model = build({"width": 32, "deep": True})
    steps(model, 60)
    return model.eval()


def logging_train(log: Path, sleep_after: int = 10**9) -> Any:
    """Trains in two rounds, and tells each start and each end by the shape of the model."""

    def log_call(what: str, model: nn.Module) -> int:
        shapes = "-".join("x".join(map(str, p.shape)) for p in model.parameters())
        with log.open("a") as file:
            file.write(f"{what} {shapes}\n")
        return log.read_text().count("start")

    def train(model: nn.Module, seed: int) -> Iterator[None]:
        if log_call("start", model) > sleep_after:
            time.sleep(600)
        for _ in range(2):
            steps(model, 10)
            yield
        log_call("end", model)

    return train


def searched(storage: Path, train: Any, **options: Any) -> SearchResult:
    wanted = {
        "original": original(),
        "inputs": torch.zeros(32, 8),
        "limit": LIMIT,
        "budget_s": 60.0,
        "prove_with": judged_by(2),
        "num_seeds": 2,
    }
    return search_architecture(build, SPACE, train, judged_by(1), storage=storage, **(wanted | options))


if __name__ == "__main__":
    torch.set_num_threads(1)
    searched(Path(sys.argv[1]), logging_train(Path(sys.argv[2]), int(sys.argv[3])))
