"""Element-wise statements as loops: dimensions that lie one in the other become one, and neighbours share a loop."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from flatout.inference.native.pointwise import C_TYPES, cast, text_of
from flatout.inference.native.statements import Map, Statement
from flatout.inference.native.values import Buffer, View, leaves


def together(statements: Sequence[Statement]) -> Iterator[list[Statement]]:
    """Statements in order; neighbours that may share a loop in one list."""
    group: list[Statement] = []
    for statement in statements:
        if group and not _may_join(group, statement):
            yield group
            group = []
        group.append(statement)
    if group:
        yield group


def _may_join(group: list[Statement], new: Statement) -> bool:
    if not isinstance(new, Map) or not all(isinstance(s, Map) for s in group):
        return False
    maps = [s for s in group if isinstance(s, Map)]
    if new.dst.shape != maps[0].dst.shape or len(group) >= 8:
        return False
    for old in maps:
        if any(v.buffer is old.dst.buffer and v != old.dst for v in leaves(new.expr)):
            return False
        if any(v.buffer is new.dst.buffer and v != new.dst for v in leaves(old.expr)):
            return False
        if old.dst.buffer is new.dst.buffer and old.dst.offset == new.dst.offset:
            return False
    return True


def collapsed(views: Sequence[View], shape: tuple[int, ...]) -> tuple[list[int], list[list[int]]]:
    """Lengths of the loops that are left, outermost first, and each view's strides in them."""
    lengths: list[int] = []
    strides: list[list[int]] = [[] for _ in views]
    for dim, length in enumerate(shape):
        if length == 1:
            continue
        if lengths and all(s[-1] == v.strides[dim] * length for s, v in zip(strides, views, strict=True)):
            lengths[-1] *= length
            for s, v in zip(strides, views, strict=True):
                s[-1] = v.strides[dim]
        else:
            lengths.append(length)
            for s, v in zip(strides, views, strict=True):
                s.append(v.strides[dim])
    return lengths, strides


def lines_of(maps: list[Map], pointer: dict[Buffer, str], passing: set[Buffer]) -> list[str]:
    """The loops of Maps over one shape, within the loop over streams.

    `pointer` names each buffer's memory, which `passing` have not.
    """
    shape = maps[0].dst.shape
    views = list(dict.fromkeys(v for m in maps for v in (m.dst, *leaves(m.expr))))
    lengths, strides = collapsed(views, shape)
    index = {v: _index(v.offset, s) for v, s in zip(views, strides, strict=True)}
    made: dict[View, str] = {}

    def load(view: View) -> str:
        return made.get(view) or f"{pointer[view.buffer]}[{index[view]}]"

    body = []
    for number, one in enumerate(maps):
        kind = C_TYPES[one.dst.dtype]
        value = text_of(cast(one.expr, one.dst.dtype), load)
        is_read_on = any(one.dst in leaves(m.expr) for m in maps[number + 1 :])
        if is_read_on:
            body.append(f"const {kind} t{number} = {value};")
            value = made[one.dst] = f"t{number}"
        if one.dst.buffer not in passing:
            body.append(f"{pointer[one.dst.buffer]}[{index[one.dst]}] = {value};")
    lines, pad = [], "  "
    for depth, length in enumerate(lengths):
        each = "FO_EACH " if depth == len(lengths) - 1 else ""
        lines.append(f"{pad * depth}{each}for (long i{depth} = 0; i{depth} < {length}; i{depth}++) {{")
    lines += [pad * len(lengths) + line for line in body]
    lines += [pad * depth + "}" for depth in reversed(range(len(lengths)))]
    return lines


def _index(offset: int, strides: list[int]) -> str:
    terms = [f"i{d}" if s == 1 else f"{s} * i{d}" for d, s in enumerate(strides) if s]
    if offset or not terms:
        terms.append(str(offset))
    return " + ".join(terms)
