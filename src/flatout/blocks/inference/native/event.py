"""One event in C: a function over one stream or several in step, its statements in order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from flatout.blocks.inference.native.statements import (
    AdvanceRing,
    Gather,
    Map,
    MatrixProduct,
    ProgramBody,
    Push,
    RowWise,
    Statement,
    reads,
    writes,
)
from flatout.blocks.inference.native.values import ALIGNMENT, C_TYPES, LANES, Buffer, View, cast, leaves, text_of
from flatout.core.records.native import Port


class StateLayout(NamedTuple):
    """Where a carried state lies in a stream's block. Rings keep a cursor of 4 bytes at `cursor`."""

    port: Port
    buffer: Buffer
    initial: bytes
    """In C order; empty when all are zero."""
    view: View
    """Its numbers in C order, as they lie (of a ring: of its window)."""
    cursor: int = -1


class EventCode:
    """The statements of one event, and where what they touch lies. Work buffers get their places here."""

    def __init__(
        self, body: ProgramBody, inputs: list[Buffer], outputs: list[Buffer], states: list[StateLayout]
    ) -> None:
        self.body, self.inputs, self.outputs, self.states = body, inputs, outputs, states
        ends = [0, *(s.buffer.offset + s.buffer.num_bytes for s in states), *(s.cursor + 4 for s in states)]
        self.state_bytes = -(-max(ends) // ALIGNMENT) * ALIGNMENT
        self.groups = list(together(body.statements))
        self.passing = unstored_buffers(self.groups)
        self.work_bytes = place_buffers(body, self.groups, self.passing)

    @property
    def parameters(self) -> str:
        """The inputs and outputs, as a function declares them."""
        inputs = [f"const {c_type(b)} *{b.name}" for b in self.inputs]
        return ", ".join([*inputs, *(f"{c_type(b)} *{b.name}" for b in self.outputs)])

    def text(self) -> Iterator[str]:
        """The lines of the C function `fo_event`."""
        places = "const uint8_t *weights, uint8_t *state, uint8_t *work"
        yield "/* One event of each of B streams. */"
        yield f"static FO_HOT void fo_event({places}, {self.parameters}, const int B) {{"
        for buffer in self.body.buffers:
            kind, begin = c_type(buffer), f"work + {buffer.offset}L * B"
            yield f"  {kind} *const {buffer.name} = ({kind} *)({begin}); /* {buffer.size} */"
        yield f"  (void){', (void)'.join(('weights', 'state', 'work', *(b.name for b in self.inputs)))};"
        for group in self.groups:
            yield from ("  " + line for line in self._lines(group))
        yield "}"

    def _lines(self, group: list[Statement]) -> Iterator[str]:
        notes = list(dict.fromkeys(s.note for s in group if s.note))
        if notes:
            yield f"/* {'; '.join(notes).replace('*/', '* /')} */"
        first = group[0]
        if isinstance(first, MatrixProduct) and self._is_flat(first):
            rows = f"{first.dst.shape[0]} * B" if first.dst.shape[0] != 1 else "B"
            yield _product(first, lambda view: _plus(_begin(view.buffer), view.offset), rows, self._row_strides(first))
        else:
            yield from self._by_stream(group, lambda pointer: self._of_stream(group, pointer))

    def _of_stream(self, group: list[Statement], pointer: dict[Buffer, str]) -> Iterable[str]:
        first = group[0]
        match first:
            case Map():
                return loop_lines([s for s in group if isinstance(s, Map)], pointer, self.passing)
            case MatrixProduct():
                strides = first.x.strides[0], first.dst.strides[0]
                return [_product(first, lambda view: _at(pointer, view), str(first.dst.shape[0]), strides)]
            case RowWise():
                return _row_wise(first, pointer)
            case Gather():
                return _gather(first, pointer)
            case Push():
                return _push(first, pointer)
            case AdvanceRing():
                return self._advance(first)

    # --------------------------------------------------------------------------------------------- all streams at once

    def _is_flat(self, product: MatrixProduct) -> bool:
        """Whether the rows of all streams lie at one distance, so that one product does them all."""
        if product.w.buffer.kind != "weight" or product.x.buffer.kind == "ring":
            return False
        rows = product.dst.shape[0]
        if rows == 1:
            return True
        return all(
            v.buffer.kind != "state" and v.strides[0] * rows == v.buffer.size and not v.offset
            for v in (product.x, product.dst)
        )

    def _row_strides(self, product: MatrixProduct) -> tuple[int, int]:
        if product.dst.shape[0] != 1:
            return product.x.strides[0], product.dst.strides[0]
        return self._step_of(product.x.buffer), self._step_of(product.dst.buffer)

    def _step_of(self, buffer: Buffer) -> int:
        """Numbers from one stream to the next."""
        if buffer.kind == "weight":
            return 0
        if buffer.kind in ("state", "ring"):
            return self.state_bytes // buffer.item_bytes
        return buffer.size

    # ------------------------------------------------------------------------------------------- one stream by another

    def _by_stream(self, group: list[Statement], body: Callable[[dict[Buffer, str]], Iterable[str]]) -> Iterator[str]:
        """The lines of `body` for each stream, with a pointer for each buffer."""
        used = list(dict.fromkeys(b for s in group for b in (writes(s), *(v.buffer for v in reads(s)))))
        used = [b for b in used if b not in self.passing]
        written = {writes(s) for s in group}
        yield "for (int b = 0; b < B; b++) {"
        for buffer in used:
            const = "" if buffer in written else "const "
            yield f"  {const}{c_type(buffer)} *const p_{buffer.name} = {self._of_this_stream(buffer)};"
        yield from ("  " + line for line in body({b: f"p_{b.name}" for b in used}))
        yield "}"

    def _of_this_stream(self, buffer: Buffer) -> str:
        """Where a buffer begins for stream b: a ring at its cursor's row."""
        if buffer.kind == "ring":
            state = f"state + b * {self.state_bytes}L"
            cursor = f"*(int32_t *)({state} + {self._cursor_of(buffer)})"
            return f"(float *)({state} + {buffer.offset}) + {buffer.row} * {cursor}"
        step = self._step_of(buffer)
        return f"{_begin(buffer)} + b * {step}L" if step else _begin(buffer)

    def _cursor_of(self, ring: Buffer) -> int:
        return next(s.cursor for s in self.states if s.buffer is ring)

    def _advance(self, advance: AdvanceRing) -> Iterator[str]:
        ring = advance.ring
        yield f"memcpy(p_{ring.name} + 0, p_{ring.name} + {ring.length * ring.row}, {4 * ring.row});"
        yield f"int32_t *const c = (int32_t *)(state + b * {self.state_bytes}L + {self._cursor_of(ring)});"
        yield f"*c = *c + 1 < {ring.length} ? *c + 1 : 0;"


def c_type(buffer: Buffer) -> str:
    """The C type of a buffer's numbers."""
    return C_TYPES[buffer.dtype]


def _begin(buffer: Buffer) -> str:
    """Where a buffer begins for the first stream."""
    if buffer.kind == "weight":
        return f"((const {c_type(buffer)} *)(weights + {buffer.offset}))"
    if buffer.kind == "state":
        return f"(({c_type(buffer)} *)(state + {buffer.offset}))"
    return buffer.name


def _plus(name: str, offset: int) -> str:
    return f"{name} + {offset}" if offset else name


def _at(pointer: dict[Buffer, str], view: View) -> str:
    return _plus(pointer[view.buffer], view.offset)


# ---------------------------------------------------------------------------------------------------------- statements


def _product(p: MatrixProduct, place: Callable[[View], str], rows: str, strides: tuple[int, int]) -> str:
    """`place` gives the address of a view; `strides` are those from row to row, of x and of dst."""
    x, w, y = f"{place(p.x)}, {strides[0]}", place(p.w), f"{place(p.dst)}, {strides[1]}"
    bias, blocks = "0" if p.bias is None else place(p.bias), -(-p.n // LANES)
    if p.scales is not None and p.sums is not None:
        sides = f"{place(p.scales)}, {place(p.sums)}"
        return f"fo_product_int8({rows}, {x}, {w}, {blocks}, {p.k}, {sides}, {bias}, {y});"
    if p.is_dot:
        return f"fo_dots({rows}, {x}, {w}, {p.row}, {p.n}, {p.k}, {bias}, {y});"
    return f"fo_product_{p.parts}({rows}, {x}, {w}, {p.row}, {p.group}, {blocks}, {p.k}, {bias}, {y});"


def _row_wise(s: RowWise, p: dict[Buffer, str]) -> Iterator[str]:
    rows, n = s.src.shape
    src = f"{_at(p, s.src)} + {s.src.strides[0]} * r" if rows > 1 else _at(p, s.src)
    dst = f"{_at(p, s.dst)} + {s.dst.strides[0]} * r" if rows > 1 else _at(p, s.dst)
    one = f"{p[s.dst.buffer]}[{s.dst.offset}{f' + {s.dst.strides[0]} * r' if rows > 1 else ''}]"
    if rows > 1:
        yield f"for (long r = 0; r < {rows}; r++)"
    if s.kind == "layer_norm":
        sides = [_at(p, v) if v is not None else "0" for v in (s.weight, s.bias)]
        kind = "".join(c for c, v in (("w", s.weight), ("b", s.bias)) if v is not None)
        yield f"  fo_layer_norm{kind and '_'}{kind}({dst}, {src}, {n}, {s.number!r}f, {sides[0]}, {sides[1]});"
    elif s.kind in ("softmax", "safe_softmax"):
        yield f"  fo_softmax({dst}, {src}, {n}, {int(s.kind == 'safe_softmax')});"
    elif s.kind == "log_softmax":
        yield f"  fo_log_softmax({dst}, {src}, {n});"
    elif s.kind == "var":
        yield f"  {one} = fo_row_var({src}, {n}, {s.number!r}f);"
    else:
        yield f"  {one} = fo_row_{s.kind}({src}, {n});"


def _gather(s: Gather, p: dict[Buffer, str]) -> Iterator[str]:
    rows, n = s.dst.shape
    index = f"{p[s.index.buffer]}[{s.index.offset} + {s.index.strides[0]} * r]"
    table = f"{_at(p, s.table)}, {s.table.strides[0]}, {s.table.shape[0]}"
    yield f"for (long r = 0; r < {rows}; r++)"
    yield f"  fo_gather_{s.dst.dtype}({_at(p, s.dst)} + {n} * r, {table}, {n}, {index});"


def _push(s: Push, p: dict[Buffer, str]) -> Iterator[str]:
    ring = s.ring
    to = f"{p[ring]}[{ring.length * ring.row} + i]"
    new = f"{p[s.src.buffer]}[{s.src.offset} + {s.src.strides[-1]} * i]"
    yield f"FO_EACH for (long i = 0; i < {ring.row}; i++) {to} = {new};"


# -- element-wise statements as loops, and where work buffers lie ------------------------------------------------------------


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


def loop_lines(maps: list[Map], pointer: dict[Buffer, str], passing: set[Buffer]) -> list[str]:
    """The loops of Maps over one shape, within the loop over streams.

    `pointer` names each buffer's memory, which `passing` have not.
    """
    shape = maps[0].dst.shape
    views = list(dict.fromkeys(v for m in maps for v in (m.dst, *leaves(m.expr))))
    lengths, strides = collapsed(views, shape)
    index = {v: _index(v.offset, s) for v, s in zip(views, strides, strict=True)}
    temporaries: dict[View, str] = {}

    def load(view: View) -> str:
        return temporaries.get(view) or f"{pointer[view.buffer]}[{index[view]}]"

    body = []
    for number, one in enumerate(maps):
        kind = C_TYPES[one.dst.dtype]
        value = text_of(cast(one.expr, one.dst.dtype), load)
        is_read_on = any(one.dst in leaves(m.expr) for m in maps[number + 1 :])
        if is_read_on:
            body.append(f"const {kind} t{number} = {value};")
            value = temporaries[one.dst] = f"t{number}"
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


# -- where work buffers lie --------------------------------------------------------------------------------------------------


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


def unstored_buffers(groups: list[list[Statement]]) -> set[Buffer]:
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


def place_buffers(body: ProgramBody, groups: list[list[Statement]], spared: set[Buffer]) -> int:
    """Give every work buffer its offset; returns the bytes of all. Large ones first, each at the lowest place that is free."""
    alive = {buffer: life for buffer, life in lives(groups).items() if buffer not in spared}
    placed: list[Buffer] = []
    end = 0
    for buffer in sorted(alive, key=lambda b: b.num_bytes, reverse=True):
        first, last = alive[buffer]
        beside = [b for b in placed if alive[b][0] <= last and first <= alive[b][1]]
        offset = 0
        for other in sorted(beside, key=lambda b: b.offset):
            if offset + buffer.num_bytes <= other.offset:
                break
            offset = max(offset, other.offset + other.num_bytes)
        buffer.offset = offset
        placed.append(buffer)
        end = max(end, offset + buffer.num_bytes)
    body.buffers = [b for b in body.buffers if b in alive]
    return end
