"""The C file: a model's event, what calls it, its state and its names; and the header."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.resources import files
from typing import Final, NamedTuple

from flatout.inference.native import states as state_functions
from flatout.inference.native import tiles
from flatout.inference.native.event import Event, StateLayout, c_type
from flatout.inference.native.statements import Body, Product
from flatout.inference.native.values import Buffer
from flatout.records.native import Port

STREAMS: Final = 8
"""That go in step when there are that many: weights are read once for all."""


class Source(NamedTuple):
    """The text, and the sizes of what its functions need."""

    code: str
    header: str
    work_bytes: int


def source(
    name: str,
    body: Body,
    inputs: list[Buffer],
    outputs: list[Buffer],
    states: list[StateLayout],
    weights_bytes: int,
    ports: tuple[list[Port], list[Port]],
) -> Source:
    """model.c and model.h."""
    event = Event(body, inputs, outputs, states)
    parts = {s.parts for s in body.statements if isinstance(s, Product) and not s.is_dot and s.scales is None}
    deepest_int8 = _deepest_int8(body)
    here = files("flatout.inference.native") / "c"
    preludes = ["vectors.h", "scalar.h", "rows.h", *(["int8.h"] if deepest_int8 else [])]
    sizes = _sizes(name.upper(), event, weights_bytes)
    marks = {"NAME_UPPER": name.upper(), "NAME_LOWER": name}
    how = "Compile with -O3 -ffp-contract=off, never with -ffast-math."
    text = "\n".join(
        [
            f"/* {name}: made by flatout from a PyTorch model. {how} */",
            "#include <math.h>\n#include <stdint.h>\n#include <string.h>\n",
            sizes,
            _replaced((here / "table.h").read_text(), marks),
            "#if !defined(FLATOUT_DISPATCH)\n",
            tiles.int8_sizes(deepest_int8) if deepest_int8 else "",
            *((here / p).read_text() for p in preludes),
            tiles.text(parts),
            tiles.int8_text() if deepest_int8 else "",
            *event.text(),
            *_calls(event),
            *state_functions.text(event),
            *_table(ports),
            "#endif /* !FLATOUT_DISPATCH */\n",
            _replaced((here / "dispatch.h").read_text(), marks),
            "#if !defined(FLATOUT_PART)",
            _replaced((here / "weights.h").read_text(), marks),
            *_named(name, event),
            "#endif",
        ]
    )
    return Source(text + "\n", _header(name, event, sizes, ports), event.work_bytes)


def _deepest_int8(body: Body) -> int:
    """The most inputs of a product in 8 bits; 0 if there is none."""
    products = (s for s in body.statements if isinstance(s, Product) and s.scales is not None)
    return max((p.k for p in products), default=0)


def _replaced(text: str, marks: dict[str, str]) -> str:
    for mark, by in marks.items():
        text = text.replace(mark, by)
    return text


def _sizes(upper: str, event: Event, weights_bytes: int) -> str:
    sizes = {
        "WEIGHTS_BYTES": weights_bytes,
        "STATE_BYTES": event.state_bytes,
        "WORK_BYTES": event.work_bytes,
        "STREAMS_WORK_BYTES": event.work_bytes * STREAMS,
        "SNAPSHOT_BYTES": state_functions.snapshot_bytes(event.states),
        "STREAMS": STREAMS,
    }
    return "\n".join(f"#define {upper}_{name} {value}" for name, value in sizes.items())


def _header(name: str, event: Event, sizes: str, ports: tuple[list[Port], list[Port]]) -> str:
    upper = name.upper()
    told = [
        f"   {kind} {p.name}: {p.dtype} {list(p.shape)}"
        for kind, group in zip(("in ", "out"), ports, strict=True)
        for p in group
    ]
    args = event.parameters
    return f"""/* {name}: made by flatout from a PyTorch model. One event takes and gives
{chr(10).join(told)}
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


def _calls(event: Event) -> Iterator[str]:
    """What the table holds: one event, many, many streams."""
    places = "const uint8_t *weights, uint8_t *state, uint8_t *work"
    names = ", ".join(b.name for b in (*event.inputs, *event.outputs))
    for count in (1, STREAMS):
        yield f"static FO_COLD void fo_event_{count}({places}, {event.parameters}) {{"
        yield f"  fo_event(weights, state, work, {names}, {count});\n}}"
    given = "const void *weights, void *state, void *work, const void *const *in, void *const *out"
    weights, state, work = "(const uint8_t *)weights", "(uint8_t *)state", "(uint8_t *)work"
    of_stream = f"{state} + t * {event.state_bytes}"
    first, at_t = _passed(event, is_moved=False), _passed(event, is_moved=True)
    yield f"""static void fo_step({given}) {{
  fo_mode mode = fo_flush();
  fo_event_1({weights}, {state}, {work}, {first});
  fo_restore(mode);
}}
static void fo_step_many({given}, int64_t n) {{
  fo_mode mode = fo_flush();
  for (int64_t t = 0; t < n; t++)
    fo_event_1({weights}, {state}, {work}, {at_t});
  fo_restore(mode);
}}
static void fo_step_streams({given}, int64_t n) {{
  fo_mode mode = fo_flush();
  int64_t t = 0;
  for (; t + {STREAMS} <= n; t += {STREAMS})
    fo_event_{STREAMS}({weights}, {of_stream}, {work}, {at_t});
  for (; t < n; t++)
    fo_event_1({weights}, {of_stream}, {work}, {at_t});
  fo_restore(mode);
}}"""


def _passed(event: Event, *, is_moved: bool) -> str:
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


def _named(name: str, event: Event) -> Iterator[str]:
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


__all__ = ["STREAMS", "Source", "StateLayout", "source"]
