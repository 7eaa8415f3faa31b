"""One replica of a small training under torchft: `torchft_train.py FOLDER REPLICA PACE_S`, for bench/torchft_kills.py.

Appends "step time participants loss" to FOLDER/log-REPLICA, and when it begins, the time to FOLDER/begun-REPLICA.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path
from time import monotonic, sleep

import torch
from torch import nn
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

FOLDER, REPLICA, PACE_S = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])


def main() -> None:
    torch.manual_seed(0)
    layers = [m for _ in range(4) for m in (nn.Linear(32, 32), nn.Tanh(), nn.Dropout(0.1))]
    net = nn.Sequential(*layers, nn.Linear(32, 1))
    adamw = torch.optim.AdamW(net.parameters(), lr=1e-2)

    def load(state: dict[str, object]) -> None:
        net.load_state_dict(state["model"])  # type: ignore[arg-type]
        adamw.load_state_dict(state["optimizer"])  # type: ignore[arg-type]

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),
        load_state_dict=load,
        state_dict=lambda: {"model": net.state_dict(), "optimizer": adamw.state_dict()},
        min_replica_size=1,
        replica_id=f"replica_{REPLICA}",
        timeout=timedelta(seconds=10),
    )
    model, optimizer = DistributedDataParallel(manager, net), Optimizer(manager, adamw)
    log = (FOLDER / f"log-{REPLICA}").open("a", buffering=1)
    with (FOLDER / f"begun-{REPLICA}").open("a") as begun:
        begun.write(f"{monotonic()}\n")
    while True:
        sleep(PACE_S)
        inputs = torch.randn(24, 32, generator=torch.Generator().manual_seed(1000 * manager.current_step() + REPLICA))
        optimizer.zero_grad()
        loss = model(inputs).square().mean()
        loss.backward()
        before = manager.current_step()
        optimizer.step()
        if manager.current_step() > before:
            participants = manager.num_participants()
            log.write(f"{manager.current_step()} {monotonic()} {participants} {loss.item().hex()}\n")


main()
