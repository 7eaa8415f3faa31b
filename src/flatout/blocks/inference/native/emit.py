"""The C file: a model's event, what calls it, its state and its names; and the header."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib.resources import files
from math import prod
from typing import Final

from flatout.blocks.inference.native import tiles
from flatout.blocks.inference.native.event import EventCode, StateLayout, c_type
from flatout.blocks.inference.native.statements import MatrixProduct, ProgramBody
from flatout.blocks.inference.native.values import Buffer
from flatout.core.records.native import Port

_C: Final = files("flatout.blocks.inference.native") / "c"
INCLUDES: Final = "#include <math.h>\n#include <stdint.h>\n#include <string.h>"
STREAMS: Final = 8
"""That go in step when there are that many: weights are read once for all."""


def source(
    name: str,
    body: ProgramBody,
    inputs: list[Buffer],
    outputs: list[Buffer],
    states: list[StateLayout],
    weights_bytes: int,
    ports: tuple[list[Port], list[Port]],
) -> tuple[str, str]:
    """The text of model.c and of model.h."""
    event = EventCode(body, inputs, outputs, states)
    products = [s for s in body.statements if isinstance(s, MatrixProduct)]
    sizes = _sizes(name.upper(), event, weights_bytes)
    placeholders = {"NAME_UPPER": name.upper(), "NAME_LOWER": name}
    how = "Compile with -O3 -ffp-contract=off, never with -ffast-math."
    text = "\n".join(
        [
            f"/* {name}: made by flatout from a PyTorch model. {how} */",
            INCLUDES + "\n",
            sizes,
            _replaced((_C / "table.h").read_text(), placeholders),
            "#if !defined(FLATOUT_DISPATCH)\n",
            *product_functions(
                {p.parts for p in products if not p.is_dot and p.scales is None},
                deepest_int8=max((p.k for p in products if p.scales is not None), default=0),
            ),
            *event.text(),
            *_calls(event),
            *_state_functions(event),
            *_table(ports),
            "#endif /* !FLATOUT_DISPATCH */\n",
            _replaced((_C / "dispatch.h").read_text(), placeholders),
            "#if !defined(FLATOUT_PART)",
            _replaced((_C / "weights.h").read_text(), placeholders),
            *_named(name, event),
            "#endif",
        ]
    )
    return text + "\n", _header(name, event, sizes, ports)


def product_functions(parts: set[int], *, deepest_int8: int) -> Iterator[str]:
    """The functions that an event calls: for products with these numbers of parts, and in 8 bits for the most inputs of one (0:
    for none)."""
    if deepest_int8:
        yield tiles.int8_sizes(deepest_int8)
    yield from (_C.joinpath(name).read_text() for name in ("vectors.h", "scalar.h", "rows.h"))
    if deepest_int8:
        yield _C.joinpath("int8.h").read_text()
    yield tiles.tile_functions(parts)
    if deepest_int8:
        yield tiles.int8_text()


def _replaced(text: str, placeholders: dict[str, str]) -> str:
    for placeholder, by in placeholders.items():
        text = text.replace(placeholder, by)
    return text


def _sizes(upper: str, event: EventCode, weights_bytes: int) -> str:
    sizes = {
        "WEIGHTS_BYTES": weights_bytes,
        "STATE_BYTES": event.state_bytes,
        "WORK_BYTES": event.work_bytes,
        "STREAMS_WORK_BYTES": event.work_bytes * STREAMS,
        "SNAPSHOT_BYTES": _snapshot_bytes(event.states),
        "STREAMS": STREAMS,
    }
    return "\n".join(f"#define {upper}_{name} {value}" for name, value in sizes.items())


def _header(name: str, event: EventCode, sizes: str, ports: tuple[list[Port], list[Port]]) -> str:
    upper = name.upper()
    port_lines = [
        f"   {kind} {p.name}: {p.dtype} {list(p.shape)}"
        for kind, group in zip(("in ", "out"), ports, strict=True)
        for p in group
    ]
    args = event.parameters
    return f"""/* {name}: made by flatout from a PyTorch model. One event takes and gives
{chr(10).join(port_lines)}
   Nothing here allocates, locks, waits or calls the system. Weights, state and work begin at multiples of 64 bytes. */
#ifndef {upper}_H
#define {upper}_H
#include <stdint.h>
#ifdef __cplusplus
extern "C" {{
#endif

{sizes}

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


def _calls(event: EventCode) -> Iterator[str]:
    """What the table holds: one event, many, many streams."""
    places = "const uint8_t *weights, uint8_t *state, uint8_t *work"
    names = ", ".join(b.name for b in (*event.inputs, *event.outputs))
    for count in (1, STREAMS):
        yield f"static FO_COLD void fo_event_{count}({places}, {event.parameters}) {{"
        yield f"  fo_event(weights, state, work, {names}, {count});\n}}"
    arguments = "const void *weights, void *state, void *work, const void *const *in, void *const *out"
    weights, state, work = "(const uint8_t *)weights", "(uint8_t *)state", "(uint8_t *)work"
    of_stream = f"{state} + t * {event.state_bytes}"
    first, at_t = _passed(event, is_moved=False), _passed(event, is_moved=True)
    yield f"""static void fo_step({arguments}) {{
  fo_mode mode = fo_flush();
  fo_event_1({weights}, {state}, {work}, {first});
  fo_restore(mode);
}}
static void fo_step_many({arguments}, int64_t n) {{
  fo_mode mode = fo_flush();
  for (int64_t t = 0; t < n; t++)
    fo_event_1({weights}, {state}, {work}, {at_t});
  fo_restore(mode);
}}
static void fo_step_streams({arguments}, int64_t n) {{
  fo_mode mode = fo_flush();
  int64_t t = 0;
  for (; t + {STREAMS} <= n; t += {STREAMS})
    fo_event_{STREAMS}({weights}, {of_stream}, {work}, {at_t});
  for (; t < n; t++)
    fo_event_1({weights}, {of_stream}, {work}, {at_t});
  fo_restore(mode);
}}"""


def _passed(event: EventCode, *, is_moved: bool) -> str:
    """The arguments of an event out of `in` and `out`: those of the first one, or of the t-th."""

    def one(kind: str, group: str, number: int, buffer: Buffer) -> str:
        return f"({kind} *){group}[{number}]" + (f" + t * {buffer.size}" if is_moved else "")

    read = [one(f"const {c_type(b)}", "in", i, b) for i, b in enumerate(event.inputs)]
    return ", ".join([*read, *(one(c_type(b), "out", i, b) for i, b in enumerate(event.outputs))])


def _table(ports: tuple[list[Port], list[Port]]) -> Iterator[str]:
    """How many inputs and outputs there are, and the bytes of each."""
    for kind, group in zip(("input", "output"), ports, strict=True):
        yield f"static const uint64_t fo_{kind}_bytes[] = {{{', '.join(str(p.num_bytes) for p in group)}}};"
    yield f"#define FO_NUM_INPUTS {len(ports[0])}\n#define FO_NUM_OUTPUTS {len(ports[1])}"


def _named(name: str, event: EventCode) -> Iterator[str]:
    """The functions of model.h."""
    ins, outs = (", ".join(b.name for b in group) for group in (event.inputs, event.outputs))
    arrays = f"  const void *const in[] = {{{ins}}};\n  void *const out[] = {{{outs}}};"
    reset = f"void {name}_reset(void *state)"
    yield f"FO_SHOWN {reset};\n{reset} {{ flatout_native_model()->reset(state); }}"
    for kind, last, extra in (
        ("step", "", ""),
        ("step_many", ", int64_t n", ", n"),
        ("step_streams", ", int64_t n", ", n"),
    ):
        head = f"void {name}_{kind}(const void *weights, void *state, void *work, {event.parameters}{last})"
        call = f"  flatout_native_model()->{kind}(weights, state, work, in, out{extra});"
        yield f"FO_SHOWN {head};\n{head} {{\n{arrays}\n{call}\n}}"


# --------------------------------------------------------------------------------------------------------- carried state


def _snapshot_bytes(states: Sequence[StateLayout]) -> int:
    """Bytes of a snapshot: all states in C order, each beginning at a multiple of 8."""
    return sum(-(-s.port.num_bytes // 8) * 8 for s in states)


def _state_functions(event: EventCode) -> Iterator[str]:
    """The functions that the table holds."""
    for s in event.states:
        if s.initial:
            yield f"static const uint8_t fo_initial_{s.buffer.name}[] = {{{', '.join(map(str, s.initial))}}};"
    yield from _restore(event.states)
    yield from _snapshot(event.states)
    yield from _reset(event)


def _restore(states: list[StateLayout]) -> Iterator[str]:
    yield "static void fo_restore_state(void *to, const void *from) {"
    yield "  uint8_t *const state = (uint8_t *)to;\n  const uint8_t *const plain = (const uint8_t *)from;"
    yield "  (void)state, (void)plain;"
    for number, s in enumerate(states):
        kind, at = c_type(s.buffer), _snapshot_bytes(states[:number])
        if s.cursor >= 0:
            yield f"  memset(state + {s.cursor}, 0, 4);"
        stored, plain = f"(({kind} *)(state + {s.buffer.offset}))", f"((const {kind} *)(plain + {at}))"
        yield from _each(s, f"{stored}[{{state}}] = {plain}[{{plain}}];")
    yield "}"


def _snapshot(states: list[StateLayout]) -> Iterator[str]:
    yield "static void fo_snapshot(const void *from, void *to) {"
    yield "  const uint8_t *const state = (const uint8_t *)from;\n  uint8_t *const plain = (uint8_t *)to;"
    yield "  (void)state, (void)plain;"
    for number, s in enumerate(states):
        kind, at = c_type(s.buffer), _snapshot_bytes(states[:number])
        shift = f" + {s.buffer.row} * *(const int32_t *)(state + {s.cursor})" if s.cursor >= 0 else ""
        stored, plain = f"((const {kind} *)(state + {s.buffer.offset}){shift})", f"((({kind} *)(plain + {at})))"
        yield from _each(s, f"{plain}[{{plain}}] = {stored}[{{state}}];")
    yield "}"


def _reset(event: EventCode) -> Iterator[str]:
    yield "static void fo_reset(void *to) {\n  uint8_t *const state = (uint8_t *)to;\n  (void)state;"
    if event.state_bytes:
        yield f"  memset(state, 0, {event.state_bytes});"
    for s in event.states:
        if s.initial:
            size = s.buffer.item_bytes
            to = f"(({c_type(s.buffer)} *)(state + {s.buffer.offset})) + {{state}}"
            yield from _each(s, f"memcpy({to}, fo_initial_{s.buffer.name} + {size} * ({{plain}}), {size});")
    yield "}"


def _each(s: StateLayout, line: str) -> Iterator[str]:
    """A line for each number of a state: {plain} is its place in C order, {state} where it lies."""
    shape = s.view.shape
    plain = [f"{prod(shape[d + 1 :])} * i{d}" for d in range(len(shape))]
    where = [f"{s.view.strides[d]} * i{d}" for d in range(len(shape))]
    loops = "".join(f"for (long i{d} = 0; i{d} < {n}; i{d}++) " for d, n in enumerate(shape))
    yield "  " + loops + line.format(plain=" + ".join(plain) or "0", state=" + ".join([*where, str(s.view.offset)]))
