"""The C file: one function for all that an event takes, over one stream or several in step, and what calls it."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.resources import files
from math import prod
from typing import Final, NamedTuple

from flatout.inference.native import plan, tiles
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

STREAMS: Final = 8
"""That go in step when there are that many: weights are read once for all."""


class StateLayout(NamedTuple):
    """Where a carried state lies in a stream's block. Rings keep a cursor of 4 bytes at `cursor`."""

    port: Port
    buffer: Buffer
    initial: bytes
    """In C order; empty when all are zero."""
    view: View
    """Its numbers in C order, as they lie (of a ring: of its window)."""
    cursor: int = -1


class Source(NamedTuple):
    """The text, and the sizes of what its functions need."""

    code: str
    header: str
    work_bytes: int


class _Writer:
    def __init__(
        self, name: str, body: Body, inputs: list[Buffer], outputs: list[Buffer], states: list[StateLayout]
    ) -> None:
        self.name, self.body, self.inputs, self.outputs, self.states = name, body, inputs, outputs, states
        self.state_bytes = _aligned(max((s.buffer.offset + plan.num_bytes(s.buffer) for s in states), default=0), states)  # fmt: skip
        self.groups = list(together(body.statements))
        self.passing = plan.passing(self.groups)
        self.work_bytes = plan.place(body, self.groups, self.passing)

    # ------------------------------------------------------------------------------------------------------ the event

    def event(self) -> Iterator[str]:
        """All statements."""
        yield "/* One event of each of B streams. */"
        ports = [
            *(f"const {_type(b)} *{b.name}" for b in self.inputs),
            *(f"{_type(b)} *{b.name}" for b in self.outputs),
        ]
        yield f"static FO_HOT void fo_event(const uint8_t *weights, uint8_t *state, uint8_t *work, {', '.join(ports)}, const int B) {{"
        for buffer in self.body.buffers:
            yield f"  {_type(buffer)} *const {buffer.name} = ({_type(buffer)} *)(work + {buffer.offset}L * B); /* {buffer.size} */"
        yield "  (void)weights, (void)state, (void)work;"
        for group in self.groups:
            yield from ("  " + line for line in self.lines(group))
        yield "}"

    def lines(self, group: list[Statement]) -> Iterator[str]:
        notes = list(dict.fromkeys(s.note for s in group if s.note))
        if notes:
            yield f"/* {'; '.join(notes).replace('*/', '* /')} */"
        first = group[0]
        if isinstance(first, Map):
            yield from self.by_stream(
                group, lambda p: lines_of([s for s in group if isinstance(s, Map)], p, self.passing)
            )
        elif isinstance(first, Product) and self.is_flat(first):
            rows = f"{first.dst.shape[0]} * B" if first.dst.shape[0] != 1 else "B"
            yield from self.product(first, rows, self.flat(first.dst), self.flat(first.x), self.row_strides(first))
        elif isinstance(first, Product):
            yield from self.by_stream(group, lambda p: list(self.product(first, str(first.dst.shape[0]), _at(p, first.dst), _at(p, first.x), (first.x.strides[0], first.dst.strides[0]), p)))  # fmt: skip
        elif isinstance(first, RowWise):
            yield from self.by_stream(group, lambda p: list(_row_wise(first, p)))
        elif isinstance(first, Gather):
            yield from self.by_stream(group, lambda p: list(_gather(first, p)))
        elif isinstance(first, Push):
            yield from self.by_stream(group, lambda p: list(_push(first, p)))
        else:
            yield from self.by_stream(group, lambda p: list(self.turn(first)))

    def is_flat(self, product: Product) -> bool:
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

    def row_strides(self, product: Product) -> tuple[int | str, int | str]:
        if product.dst.shape[0] != 1:
            return product.x.strides[0], product.dst.strides[0]
        return self.step_of(product.x.buffer), self.step_of(product.dst.buffer)

    def step_of(self, buffer: Buffer) -> int:
        """Numbers from one stream to the next."""
        if buffer.kind == "weight":
            return 0
        if buffer.kind in ("state", "ring"):
            return self.state_bytes // plan.SIZES[_type(buffer)]
        return buffer.size

    def flat(self, view: View) -> str:
        """The address of a view of the first stream."""
        return _plus(self.base(view.buffer), view.offset)

    def base(self, buffer: Buffer) -> str:
        if buffer.kind == "weight":
            return f"((const {_type(buffer)} *)(weights + {buffer.offset}))"
        if buffer.kind == "state":
            return f"(({_type(buffer)} *)(state + {buffer.offset}))"
        return buffer.name

    def by_stream(self, group: list[Statement], body: object) -> Iterator[str]:
        """The lines of `body` for each stream, with a pointer for each buffer."""
        used = list(dict.fromkeys(b for s in group for b in (writes(s), *(v.buffer for v in reads(s)))))
        used = [b for b in used if b not in self.passing]
        pointer = {b: f"p_{b.name}" for b in used}
        written = {writes(s) for s in group}
        yield "for (int b = 0; b < B; b++) {"
        for buffer in used:
            const = "" if buffer in written else "const "
            if buffer.kind == "ring":
                cursor = next(s.cursor for s in self.states if s.buffer is buffer)
                yield f"  {const}float *const p_{buffer.name} = (float *)(state + b * {self.state_bytes}L + {buffer.offset}) + {buffer.row} * *(int32_t *)(state + b * {self.state_bytes}L + {cursor});"
            else:
                step = f" + b * {self.step_of(buffer)}L" if self.step_of(buffer) else ""
                yield f"  {const}{_type(buffer)} *const p_{buffer.name} = {self.base(buffer)}{step};"
        yield from ("  " + line for line in body(pointer))  # type: ignore[operator]
        yield "}"

    def product(self, p: Product, rows: str, y: str, x: str, strides: tuple[int | str, int | str], pointer: dict[Buffer, str] | None = None) -> Iterator[str]:  # fmt: skip
        def place(view: View) -> str:
            return _at(pointer, view) if pointer else self.flat(view)

        w, bias = place(p.w), "0" if p.bias is None else place(p.bias)
        if p.scales is not None and p.sums is not None:
            yield f"fo_product_int8({rows}, {x}, {strides[0]}, {w}, {-(-p.n // LANES)}, {p.k}, {place(p.scales)}, {place(p.sums)}, {bias}, {y}, {strides[1]});"
        elif p.is_dot:
            yield f"fo_dots({rows}, {x}, {strides[0]}, {w}, {p.row}, {p.n}, {p.k}, {bias}, {y}, {strides[1]});"
        else:
            yield f"fo_product_{p.parts}({rows}, {x}, {strides[0]}, {w}, {p.row}, {p.block}, {-(-p.n // LANES)}, {p.k}, {bias}, {y}, {strides[1]});"

    def turn(self, turn: Turn) -> Iterator[str]:
        ring = turn.ring
        cursor = next(s.cursor for s in self.states if s.buffer is ring)
        yield f"memcpy(p_{ring.name} + 0, p_{ring.name} + {ring.length * ring.row}, {4 * ring.row});"
        yield f"int32_t *const c = (int32_t *)(state + b * {self.state_bytes}L + {cursor});"
        yield f"*c = *c + 1 < {ring.length} ? *c + 1 : 0;"


def _type(buffer: Buffer) -> str:
    return C_TYPES[buffer.dtype]


def _aligned(end: int, states: list[StateLayout]) -> int:
    end = max([end, *(s.cursor + 4 for s in states)])
    return -(-end // plan.ALIGNMENT) * plan.ALIGNMENT


def _plus(name: str, offset: int) -> str:
    return f"{name} + {offset}" if offset else name


def _at(pointer: dict[Buffer, str] | None, view: View) -> str:
    assert pointer is not None
    return _plus(pointer[view.buffer], view.offset)


def _row_wise(s: RowWise, p: dict[Buffer, str]) -> Iterator[str]:
    rows, n = s.src.shape
    src = f"{_at(p, s.src)} + {s.src.strides[0]} * r" if rows > 1 else _at(p, s.src)
    dst = f"{_at(p, s.dst)} + {s.dst.strides[0]} * r" if rows > 1 else _at(p, s.dst)
    one = f"{p[s.dst.buffer]}[{s.dst.offset}{f' + {s.dst.strides[0]} * r' if rows > 1 else ''}]"
    if rows > 1:
        yield f"for (long r = 0; r < {rows}; r++)"
    if s.kind == "layer_norm":
        sides = [_at(p, v) if v is not None else "0" for v in (s.weight, s.bias)]
        yield f"  fo_layer_norm({dst}, {src}, {n}, {s.number!r}f, {sides[0]}, {sides[1]});"
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
    yield f"for (long r = 0; r < {rows}; r++)"
    yield f"  fo_gather_{s.dst.dtype}({_at(p, s.dst)} + {n} * r, {_at(p, s.table)}, {s.table.strides[0]}, {s.table.shape[0]}, {n}, {index});"


def _push(s: Push, p: dict[Buffer, str]) -> Iterator[str]:
    ring = s.ring
    at = f"{p[ring]}[{ring.length * ring.row} + i]"
    yield f"FO_EACH for (long i = 0; i < {ring.row}; i++) {at} = {p[s.src.buffer]}[{s.src.offset} + {s.src.strides[-1]} * i];"


# ------------------------------------------------------------------------------------------------------------- the file


def source(name: str, body: Body, inputs: list[Buffer], outputs: list[Buffer], states: list[StateLayout], weights_bytes: int,
           ports: tuple[list[Port], list[Port]], identity: bytes) -> Source:  # fmt: skip
    """model.c and model.h. `identity` are 16 bytes that weights of this model carry."""
    writer = _Writer(name, body, inputs, outputs, states)
    parts = {s.parts for s in body.statements if isinstance(s, Product) and not s.is_dot and s.scales is None}
    has_int8 = any(isinstance(s, Product) and s.scales is not None for s in body.statements)
    here = files("flatout.inference.native") / "c"
    preludes = ["vectors.h", "scalar.h", "rows.h", *(["int8.h"] if has_int8 else [])]
    upper = name.upper()
    header = _header(name, writer, weights_bytes, ports)
    table = (here / "table.h").read_text()
    marks = {"NAME_UPPER": upper, "NAME_LOWER": name}
    text = "\n".join(
        [
            f"/* {name}: made by flatout from a PyTorch model. Compile with -O3 -ffp-contract=off, never with -ffast-math. */",
            "#include <math.h>\n#include <stdint.h>\n#include <string.h>\n",
            _sizes(upper, writer, weights_bytes),
            _replaced(table, marks),
            "#if !defined(FLATOUT_DISPATCH)\n",
            f"#define FO_MOST_INT8 {_most_int8(body)}" if has_int8 else "",
            *((here / p).read_text() for p in preludes),
            tiles.text(parts),
            *writer.event(),
            *_calls(name, writer, ports),
            "#endif /* !FLATOUT_DISPATCH */\n",
            _replaced((here / "dispatch.h").read_text(), marks),
            "#if !defined(FLATOUT_PART)",
            _replaced((here / "weights.h").read_text(), marks),
            *_named(name, writer, ports),
            "#endif",
        ]
    )
    return Source(text + "\n", header, writer.work_bytes)


def _most_int8(body: Body) -> int:
    return max(-(-s.k // 64) * 64 for s in body.statements if isinstance(s, Product) and s.scales is not None)


def _replaced(text: str, marks: dict[str, str]) -> str:
    for mark, by in marks.items():
        text = text.replace(mark, by)
    return text


def _sizes(upper: str, w: _Writer, weights_bytes: int) -> str:
    snapshot = sum(-(-s.port.num_bytes // 8) * 8 for s in w.states)
    return "\n".join(
        f"#define {upper}_{name} {value}"
        for name, value in (
            ("WEIGHTS_BYTES", weights_bytes), ("STATE_BYTES", w.state_bytes), ("WORK_BYTES", w.work_bytes),
            ("STREAMS_WORK_BYTES", w.work_bytes * STREAMS), ("SNAPSHOT_BYTES", snapshot), ("STREAMS", STREAMS),
        )
    )  # fmt: skip


def _header(name: str, w: _Writer, weights_bytes: int, ports: tuple[list[Port], list[Port]]) -> str:
    upper = name.upper()
    told = [
        f"   {kind} {p.name}: {p.dtype} {list(p.shape)}"
        for kind, group in zip(("in ", "out"), ports, strict=True)
        for p in group
    ]
    args = ", ".join(_parameters(w, ports))
    return f"""/* {name}: made by flatout from a PyTorch model. One event takes and gives
{chr(10).join(told)}
   Nothing here allocates, locks, waits or calls the system. Weights, state and work begin at multiples of 64 bytes. */
#ifndef {upper}_H
#define {upper}_H
#include <stdint.h>
#ifdef __cplusplus
extern "C" {{
#endif

{_sizes(upper, w, weights_bytes)}

/* The weights in `file`, the bytes of weights.bin at a multiple of 64; NULL if they are torn, or of another model. */
const void *{name}_weights(const void *file, uint64_t bytes);
/* A state as it is before the first event: {upper}_STATE_BYTES, which are 0 for a model that carries nothing. */
void {name}_reset(void *state);
/* One event; `work` is {upper}_WORK_BYTES that may hold anything. */
void {name}_step(const void *weights, void *state, void *work, {args});
/* n events, one after the other in memory and in time. */
void {name}_step_many(const void *weights, void *state, void *work, {args}, int64_t n);
/* One event of each of n streams, whose states lie one after the other; `work` is {upper}_STREAMS_WORK_BYTES. */
void {name}_step_streams(const void *weights, void *states, void *work, {args}, int64_t n);

#ifdef __cplusplus
}}
#endif
#endif
"""


def _parameters(w: _Writer, ports: tuple[list[Port], list[Port]]) -> list[str]:
    return [*(f"const {_type(b)} *{b.name}" for b in w.inputs), *(f"{_type(b)} *{b.name}" for b in w.outputs)]


def _calls(name: str, w: _Writer, ports: tuple[list[Port], list[Port]]) -> Iterator[str]:
    """What the table holds."""
    passed = ", ".join([*(f"(const {_type(b)} *)in[{i}]" for i, b in enumerate(w.inputs)), *(f"({_type(b)} *)out[{i}]" for i, b in enumerate(w.outputs))])  # fmt: skip
    moved = ", ".join([*(f"(const {_type(b)} *)in[{i}] + t * {b.size}" for i, b in enumerate(w.inputs)), *(f"({_type(b)} *)out[{i}] + t * {b.size}" for i, b in enumerate(w.outputs))])  # fmt: skip
    given = "const void *weights, void *state, void *work, const void *const *in, void *const *out"
    ports_of = ", ".join(_parameters(w, ports))
    names = ", ".join(b.name for b in (*w.inputs, *w.outputs))
    for count in (1, STREAMS):
        yield f"static FO_COLD void fo_event_{count}(const uint8_t *weights, uint8_t *state, uint8_t *work, {ports_of}) {{"
        yield f"  fo_event(weights, state, work, {names}, {count});\n}}"
    yield f"""static void fo_step({given}) {{
  fo_mode mode = fo_flush();
  fo_event_1((const uint8_t *)weights, (uint8_t *)state, (uint8_t *)work, {passed});
  fo_restore(mode);
}}
static void fo_step_many({given}, int64_t n) {{
  fo_mode mode = fo_flush();
  for (int64_t t = 0; t < n; t++)
    fo_event_1((const uint8_t *)weights, (uint8_t *)state, (uint8_t *)work, {moved});
  fo_restore(mode);
}}
static void fo_step_streams({given}, int64_t n) {{
  fo_mode mode = fo_flush();
  int64_t t = 0;
  for (; t + {STREAMS} <= n; t += {STREAMS})
    fo_event_{STREAMS}((const uint8_t *)weights, (uint8_t *)state + t * {w.state_bytes}, (uint8_t *)work, {moved});
  for (; t < n; t++)
    fo_event_1((const uint8_t *)weights, (uint8_t *)state + t * {w.state_bytes}, (uint8_t *)work, {moved});
  fo_restore(mode);
}}"""
    yield from _states(w)
    yield "static const uint64_t fo_input_bytes[] = {" + ", ".join(str(p.num_bytes) for p in ports[0]) + "};"
    yield "static const uint64_t fo_output_bytes[] = {" + ", ".join(str(p.num_bytes) for p in ports[1]) + "};"
    yield f"#define FO_NUM_INPUTS {len(ports[0])}\n#define FO_NUM_OUTPUTS {len(ports[1])}"


def _named(name: str, w: _Writer, ports: tuple[list[Port], list[Port]]) -> Iterator[str]:
    """The functions of model.h."""
    args = ", ".join(_parameters(w, ports))
    ins, outs = (", ".join(b.name for b in group) for group in (w.inputs, w.outputs))
    body = f"  const void *const in[] = {{{ins}}};\n  void *const out[] = {{{outs}}};"
    yield f"FO_SHOWN void {name}_reset(void *state);\nvoid {name}_reset(void *state) {{ flatout_native_model()->reset(state); }}"
    for kind, last, extra in (
        ("step", "", ""),
        ("step_many", ", int64_t n", ", n"),
        ("step_streams", ", int64_t n", ", n"),
    ):
        head = f"void {name}_{kind}(const void *weights, void *state, void *work, {args}{last})"
        yield f"FO_SHOWN {head};\n{head} {{\n{body}\n  flatout_native_model()->{kind}(weights, state, work, in, out{extra});\n}}"


def _states(w: _Writer) -> Iterator[str]:
    for s in w.states:
        if s.initial:
            numbers = ", ".join(map(str, s.initial))
            yield f"static const uint8_t fo_initial_{s.buffer.name}[] = {{{numbers}}};"
    yield "static void fo_restore_state(void *to, const void *from) {"
    yield "  uint8_t *const state = (uint8_t *)to;\n  const uint8_t *const plain = (const uint8_t *)from;\n  (void)state, (void)plain;"
    at = 0
    for s in w.states:
        kind = _type(s.buffer)
        if s.cursor >= 0:
            yield f"  memset(state + {s.cursor}, 0, 4);"
        yield from _copied(
            s, f"(({kind} *)(state + {s.buffer.offset}))[{{state}}] = ((const {kind} *)(plain + {at}))[{{plain}}];"
        )
        at += -(-s.port.num_bytes // 8) * 8
    yield "}\nstatic void fo_snapshot(const void *from, void *to) {"
    yield "  const uint8_t *const state = (const uint8_t *)from;\n  uint8_t *const plain = (uint8_t *)to;\n  (void)state, (void)plain;"
    at = 0
    for s in w.states:
        kind = _type(s.buffer)
        shift = f" + {s.buffer.row} * *(const int32_t *)(state + {s.cursor})" if s.cursor >= 0 else ""
        yield from _copied(
            s,
            f"((({kind} *)(plain + {at})))[{{plain}}] = ((const {kind} *)(state + {s.buffer.offset}){shift})[{{state}}];",
        )
        at += -(-s.port.num_bytes // 8) * 8
    yield "}\nstatic void fo_reset(void *to) {\n  uint8_t *const state = (uint8_t *)to;\n  (void)state;"
    if w.state_bytes:
        yield f"  memset(state, 0, {w.state_bytes});"
    for s in w.states:
        if s.initial:
            kind = _type(s.buffer)
            yield from _copied(s, f"memcpy((({kind} *)(state + {s.buffer.offset})) + {{state}}, fo_initial_{s.buffer.name} + {plan.SIZES[kind]} * ({{plain}}), {plan.SIZES[kind]});")  # fmt: skip
    yield "}"


def _copied(s: StateLayout, line: str) -> Iterator[str]:
    """A line for each number of a state."""
    shape = s.view.shape
    plain, where = [], []
    for d in range(len(shape)):
        step = prod(shape[d + 1 :])
        plain.append(f"{step} * i{d}")
        where.append(f"{s.view.strides[d]} * i{d}")
    loops = "".join(f"for (long i{d} = 0; i{d} < {n}; i{d}++) " for d, n in enumerate(shape))
    yield "  " + loops + line.format(plain=" + ".join(plain) or "0", state=" + ".join([*where, str(s.view.offset)]))
