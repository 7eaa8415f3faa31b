"""Where work buffers lie: those that are not alive at the same time share memory."""

from __future__ import annotations

from typing import Final

from flatout.inference.native.pointwise import C_TYPES
from flatout.inference.native.statements import Body, Map, Statement, reads, writes
from flatout.inference.native.values import Buffer, leaves

ALIGNMENT: Final = 64
SIZES: Final = {"float": 4, "int32_t": 4, "int64_t": 8, "uint8_t": 1, "int8_t": 1}


def num_bytes(buffer: Buffer) -> int:
    """Rounded up to whole cache lines."""
    return -(-buffer.size * SIZES[C_TYPES[buffer.dtype]] // ALIGNMENT) * ALIGNMENT


def lives(groups: list[list[Statement]]) -> dict[Buffer, tuple[int, int]]:
    """The first and the last group of statements that touches each work buffer.

    A group shares a loop: all in it is alive at once.
    """
    found: dict[Buffer, tuple[int, int]] = {}
    for at, group in enumerate(groups):
        for statement in group:
            for buffer in (writes(statement), *(view.buffer for view in reads(statement))):
                if buffer.kind == "work":
                    found[buffer] = (found.get(buffer, (at, at))[0], at)
    return found


def passing(groups: list[list[Statement]]) -> set[Buffer]:
    """Work buffers whose numbers are read in the loop that makes them and nowhere else: they need no memory."""
    alive = lives(groups)
    found: set[Buffer] = set()
    for group in groups:
        maps = [s for s in group if isinstance(s, Map)]
        for number, one in enumerate(maps):
            buffer = one.dst.buffer
            if (
                buffer.kind != "work"
                or alive[buffer][0] != alive[buffer][1]
                or sum(m.dst.buffer is buffer for m in maps) > 1
            ):
                continue
            readers = [v for m in maps[number + 1 :] for v in leaves(m.expr) if v.buffer is buffer]
            if readers and all(v == one.dst for v in readers):
                found.add(buffer)
    return found


def place(body: Body, groups: list[list[Statement]], spared: set[Buffer]) -> int:
    """Give every work buffer its offset; returns the bytes of all. Large ones first, each at the lowest place that is free."""
    alive = {buffer: life for buffer, life in lives(groups).items() if buffer not in spared}
    placed: list[Buffer] = []
    end = 0
    for buffer in sorted(alive, key=num_bytes, reverse=True):
        first, last = alive[buffer]
        beside = [b for b in placed if alive[b][0] <= last and first <= alive[b][1]]
        offset = 0
        for other in sorted(beside, key=lambda b: b.offset):
            if offset + num_bytes(buffer) <= other.offset:
                break
            offset = max(offset, other.offset + num_bytes(other))
        buffer.offset = offset
        placed.append(buffer)
        end = max(end, offset + num_bytes(buffer))
    body.buffers = [b for b in body.buffers if b in alive]
    return end
