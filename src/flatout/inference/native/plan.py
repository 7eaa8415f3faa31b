"""Where work buffers lie: those that are not alive at the same time share memory."""

from __future__ import annotations

from typing import Final

from flatout.inference.native.pointwise import C_TYPES
from flatout.inference.native.statements import Body, Statement, reads, writes
from flatout.inference.native.values import Buffer

ALIGNMENT: Final = 64
SIZES: Final = {"float": 4, "int32_t": 4, "int64_t": 8, "uint8_t": 1, "int8_t": 1}


def num_bytes(buffer: Buffer) -> int:
    """Rounded up to whole cache lines."""
    return -(-buffer.size * SIZES[C_TYPES[buffer.dtype]] // ALIGNMENT) * ALIGNMENT


def lives(statements: list[Statement]) -> dict[Buffer, tuple[int, int]]:
    """The first and the last statement that touches each work buffer."""
    found: dict[Buffer, tuple[int, int]] = {}
    for at, statement in enumerate(statements):
        for buffer in (writes(statement), *(view.buffer for view in reads(statement))):
            if buffer.kind == "work":
                found[buffer] = (found.get(buffer, (at, at))[0], at)
    return found


def place(body: Body) -> int:
    """Give every work buffer its offset; returns the bytes of all. Large ones first, each at the lowest place that is free."""
    alive = lives(body.statements)
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
