"""What is done with a stream's carried state in C: reset, snapshot, restore."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

from flatout.inference.native import plan
from flatout.inference.native.event import Event, StateLayout, c_type


def snapshot_bytes(states: Sequence[StateLayout]) -> int:
    """Of all states in C order, each beginning at a multiple of 8."""
    return sum(-(-s.port.num_bytes // 8) * 8 for s in states)


def text(event: Event) -> Iterator[str]:
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
        kind, at = c_type(s.buffer), snapshot_bytes(states[:number])
        if s.cursor >= 0:
            yield f"  memset(state + {s.cursor}, 0, 4);"
        held, plain = f"(({kind} *)(state + {s.buffer.offset}))", f"((const {kind} *)(plain + {at}))"
        yield from _each(s, f"{held}[{{state}}] = {plain}[{{plain}}];")
    yield "}"


def _snapshot(states: list[StateLayout]) -> Iterator[str]:
    yield "static void fo_snapshot(const void *from, void *to) {"
    yield "  const uint8_t *const state = (const uint8_t *)from;\n  uint8_t *const plain = (uint8_t *)to;"
    yield "  (void)state, (void)plain;"
    for number, s in enumerate(states):
        kind, at = c_type(s.buffer), snapshot_bytes(states[:number])
        shift = f" + {s.buffer.row} * *(const int32_t *)(state + {s.cursor})" if s.cursor >= 0 else ""
        held, plain = f"((const {kind} *)(state + {s.buffer.offset}){shift})", f"((({kind} *)(plain + {at})))"
        yield from _each(s, f"{plain}[{{plain}}] = {held}[{{state}}];")
    yield "}"


def _reset(event: Event) -> Iterator[str]:
    yield "static void fo_reset(void *to) {\n  uint8_t *const state = (uint8_t *)to;\n  (void)state;"
    if event.state_bytes:
        yield f"  memset(state, 0, {event.state_bytes});"
    for s in event.states:
        if s.initial:
            size = plan.SIZES[c_type(s.buffer)]
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
