"""A store of one start of a job's ranks alone, where the launcher's store outlives them.

torchrun's ranks share the store of its rendezvous, and find there what ranks of an earlier start have left: addresses that nobody
listens at, so that the next start fails to connect, or hangs (pytorch issue 135712; torch 2.13 does so still). How often a node's
agent has started its ranks is no name for a start, since agents count by themselves.
"""

from __future__ import annotations

import json
import time
import uuid
from typing import Final

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from flatout.core.errors import UsageError

_ROOT: Final = "flatout/start"
_POLL_S: Final = 0.02
_PATIENCE_S: Final = 600.0


def own_store(store: Store, rank: int, num_ranks: int, *, patience_s: float = _PATIENCE_S) -> Store:
    """The part of `store` that belongs to this start of `num_ranks` ranks; all of them call it.

    Each rank leaves a number that nobody had before. Rank 0 proposes a name for those that it finds, until each of these ranks
    has answered to just that name; numbers of ranks that are gone are never answered. Raises UsageError when ranks are missing.
    """
    mine, deadline_s = uuid.uuid4().hex, time.monotonic() + patience_s
    store.set(f"{_ROOT}/hello/{rank}", mine)
    name = _proposed_name(store, num_ranks, deadline_s) if rank == 0 else _accepted_name(store, rank, mine, deadline_s)
    return PrefixStore(f"{_ROOT}/{name}", store)


def _proposed_name(store: Store, num_ranks: int, deadline_s: float) -> str:
    """Rank 0's part: a name to which all ranks have answered."""
    keys = [f"{_ROOT}/hello/{rank}" for rank in range(num_ranks)]
    known: list[str] = []
    name = ""
    while True:
        numbers = [value.decode() for value in store.multi_get(keys)] if store.check(keys) else []
        if numbers and numbers != known:
            known, name = numbers, uuid.uuid4().hex
            store.set(f"{_ROOT}/proposal", json.dumps([name, numbers]))
        if name and store.add(f"{_ROOT}/{name}/answers", 0) == num_ranks - 1:
            store.set(f"{_ROOT}/{name}/go", "1")
            return name
        _wait(deadline_s, f"of {num_ranks} ranks some did not come")


def _accepted_name(store: Store, rank: int, mine: str, deadline_s: float) -> str:
    """The part of another rank: the name that was proposed to it, once all have answered."""
    answered = ""
    while True:
        if store.check([f"{_ROOT}/proposal"]):
            name, numbers = json.loads(store.get(f"{_ROOT}/proposal"))
            if rank < len(numbers) and numbers[rank] == mine and name != answered:
                store.add(f"{_ROOT}/{name}/answers", 1)
                answered = name
        if answered and store.check([f"{_ROOT}/{answered}/go"]):
            return answered
        _wait(deadline_s, f"rank 0 did not come, or other ranks than rank {rank} did not")


def _wait(deadline_s: float, why: str) -> None:
    if time.monotonic() > deadline_s:
        raise UsageError(f"the ranks of this start did not find one another: {why}; see what they printed")
    time.sleep(_POLL_S)


def join_ranks(backend: str, **options: object) -> None:
    """`torch.distributed.init_process_group` for ranks that torchrun has started, at a store of this start alone."""
    store, rank, num_ranks = next(rendezvous("env://"))
    mine = own_store(store, rank, num_ranks)
    dist.init_process_group(backend, store=mine, rank=rank, world_size=num_ranks, **options)  # type: ignore[arg-type]
