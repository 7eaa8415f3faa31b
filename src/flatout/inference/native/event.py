"""One event in C: a function over one stream or several in step, its statements in order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from flatout.inference.native import plan
from flatout.inference.native.loops import lines_of, together
from flatout.inference.native.pointwise import C_TYPES
from flatout.inference.native.statements import (
    Body,
    Gather,
    Map,
    Product,
    Push,
    RowWise,
    Statement,
    Turn,
    reads,
    writes,
)
from flatout.inference.native.values import LANES, Buffer, View
from flatout.records.native import Port


class StateLayout(NamedTuple):
    """Where a carried state lies in a stream's block. Rings keep a cursor of 4 bytes at `cursor`."""

    port: Port
    buffer: Buffer
    initial: bytes
    """In C order; empty when all are zero."""
    view: View
    """Its numbers in C order, as they lie (of a ring: of its window)."""
    cursor: int = -1


class Event:
    """The statements of one event, and where what they touch lies. Work buffers get their places here."""

    def __init__(self, body: Body, inputs: list[Buffer], outputs: list[Buffer], states: list[StateLayout]) -> None:
        self.body, self.inputs, self.outputs, self.states = body, inputs, outputs, states
        self.state_bytes = _state_bytes(states)
        self.groups = list(together(body.statements))
        self.passing = plan.passing(self.groups)
        self.work_bytes = plan.place(body, self.groups, self.passing)

    @property
    def parameters(self) -> str:
        """The inputs and outputs, as a function declares them."""
        given = [f"const {c_type(b)} *{b.name}" for b in self.inputs]
        return ", ".join([*given, *(f"{c_type(b)} *{b.name}" for b in self.outputs)])

    def text(self) -> Iterator[str]:
        """The function `fo_event`."""
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
        if isinstance(first, Product) and self._is_flat(first):
            rows = f"{first.dst.shape[0]} * B" if first.dst.shape[0] != 1 else "B"
            yield _product(first, self._flat, rows, self._row_strides(first))
        else:
            yield from self._by_stream(group, lambda pointer: self._of_stream(group, pointer))

    def _of_stream(self, group: list[Statement], pointer: dict[Buffer, str]) -> Iterable[str]:
        first = group[0]
        match first:
            case Map():
                return lines_of([s for s in group if isinstance(s, Map)], pointer, self.passing)
            case Product():
                strides = first.x.strides[0], first.dst.strides[0]
                return [_product(first, lambda view: _at(pointer, view), str(first.dst.shape[0]), strides)]
            case RowWise():
                return _row_wise(first, pointer)
            case Gather():
                return _gather(first, pointer)
            case Push():
                return _push(first, pointer)
            case Turn():
                return self._turn(first)

    # --------------------------------------------------------------------------------------------- all streams at once

    def _is_flat(self, product: Product) -> bool:
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

    def _row_strides(self, product: Product) -> tuple[int, int]:
        if product.dst.shape[0] != 1:
            return product.x.strides[0], product.dst.strides[0]
        return self._step_of(product.x.buffer), self._step_of(product.dst.buffer)

    def _step_of(self, buffer: Buffer) -> int:
        """Numbers from one stream to the next."""
        if buffer.kind == "weight":
            return 0
        if buffer.kind in ("state", "ring"):
            return self.state_bytes // plan.SIZES[c_type(buffer)]
        return buffer.size

    def _flat(self, view: View) -> str:
        """The address of a view of the first stream."""
        return _plus(_begin(view.buffer), view.offset)

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

    def _turn(self, turn: Turn) -> Iterator[str]:
        ring = turn.ring
        yield f"memcpy(p_{ring.name} + 0, p_{ring.name} + {ring.length * ring.row}, {4 * ring.row});"
        yield f"int32_t *const c = (int32_t *)(state + b * {self.state_bytes}L + {self._cursor_of(ring)});"
        yield f"*c = *c + 1 < {ring.length} ? *c + 1 : 0;"


def c_type(buffer: Buffer) -> str:
    """Of its numbers."""
    return C_TYPES[buffer.dtype]


def _state_bytes(states: list[StateLayout]) -> int:
    ends = [0, *(s.buffer.offset + plan.num_bytes(s.buffer) for s in states), *(s.cursor + 4 for s in states)]
    return -(-max(ends) // plan.ALIGNMENT) * plan.ALIGNMENT


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


def _product(p: Product, place: Callable[[View], str], rows: str, strides: tuple[int, int]) -> str:
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
