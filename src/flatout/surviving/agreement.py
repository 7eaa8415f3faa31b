"""Which step ranks go on from: the newest of which there are copies for all of them, and who reads whose."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec


class Seen(msgspec.Struct, frozen=True, array_like=True):
    """A copy that looks whole, in a node's memory: of the state of `rank` of `num_ranks` after `step`; in which file."""

    step: int
    rank: int
    num_ranks: int
    is_sharded: bool
    file: str


class Table(msgspec.Struct, frozen=True, array_like=True):
    """What one rank sees: its node, and the copies there."""

    node: int
    seen: tuple[Seen, ...]


class Reading(msgspec.Struct, frozen=True):
    """One rank's part in a plan: which ranks' copies it reads on its node, or who sends its own, and to whom it sends."""

    files: dict[int, str] = {}
    sender: int | None = None
    sends: tuple[tuple[int, str], ...] = ()


def plans(tables: Sequence[Table]) -> Iterator[tuple[int, list[Reading]]]:
    """Steps, the newest first, that can be gone on from, with each rank's reading. All ranks come to the same.

    Copies of as many ranks are read as they are, each rank its own, from another node where there is none on this one. Copies of
    another number of ranks are read where each rank sees all of them, or one if nothing in them is sharded.
    """
    kinds = {(s.step, s.num_ranks) for table in tables for s in table.seen}
    for step, num_ranks in sorted(kinds, key=lambda kind: (-kind[0], kind[1] != len(tables))):
        held = [{s.rank: s for s in t.seen if (s.step, s.num_ranks) == (step, num_ranks)} for t in tables]
        made = _same(held, tables) if num_ranks == len(tables) else _other(held, num_ranks)
        if made is not None:
            yield step, made


def _same(held: list[dict[int, Seen]], tables: Sequence[Table]) -> list[Reading] | None:
    readings: list[Reading] = []
    sends: dict[int, list[tuple[int, str]]] = {}
    for rank in range(len(tables)):
        if rank in held[rank]:
            readings.append(Reading(files={rank: held[rank][rank].file}))
            continue
        sender = next((other for other, seen in enumerate(held) if rank in seen), None)
        if sender is None:
            return None
        sends.setdefault(sender, []).append((rank, held[sender][rank].file))
        readings.append(Reading(sender=sender))
    return [msgspec.structs.replace(r, sends=tuple(sends.get(rank, ()))) for rank, r in enumerate(readings)]


def _other(held: list[dict[int, Seen]], num_ranks: int) -> list[Reading] | None:
    readings: list[Reading] = []
    for seen in held:
        if len(seen) == num_ranks:
            readings.append(Reading(files={rank: s.file for rank, s in seen.items()}))
        elif seen and not any(s.is_sharded for s in seen.values()):
            rank = min(seen)
            readings.append(Reading(files={rank: seen[rank].file}))
        else:
            return None
    return readings


def buddies(nodes: Sequence[int], *, is_within: bool) -> list[int | None]:
    """By rank, who holds a copy of its state: the rank at the same place of the next node, or, `is_within` one, the next rank.

    >>> buddies([0, 0, 1, 1], is_within=False)
    [2, 3, 0, 1]
    >>> buddies([0, 0], is_within=False)
    [None, None]
    """
    if len(nodes) < 2 or (len(set(nodes)) < 2 and not is_within):
        return [None] * len(nodes)
    if is_within:
        return [(rank + 1) % len(nodes) for rank in range(len(nodes))]
    order = sorted(set(nodes))
    members = {node: [rank for rank, other in enumerate(nodes) if other == node] for node in order}
    found: list[int | None] = []
    for rank, node in enumerate(nodes):
        there = members[order[(order.index(node) + 1) % len(order)]]
        found.append(there[members[node].index(rank) % len(there)])
    return found
