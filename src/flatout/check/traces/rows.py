"""Operators of one step of a trace as rows of equal calls."""

from __future__ import annotations

import re
from collections import defaultdict
from math import prod
from typing import Final, NamedTuple, cast

from flatout.check.traces.activity import Activity
from flatout.check.traces.events import ELEMENT_BYTES, HostOp
from flatout.check.traces.host import HostStep, Nesting, is_operator, operator_name
from flatout.core.errors import UsageError
from flatout.core.records.evidence import HostRead, Operator, Phase, TensorSpec
from flatout.machine.cost.flops import operator_flop

_READS: Final = ("aten::_local_scalar_dense",)
_WHOLE: Final = ("aten::conv1d", "aten::conv2d", "aten::conv3d", "aten::convolution_backward")
"""Known work whose FLOP some traces do not show, without what convolutions were called with: one row all the same, with what they
call."""

_PARTS: Final = re.compile(r"^inductor\..*_(?:embedding|gather|index|scatter|select|slice|split)(?:_|$)")
"""Compiled kernels that may read or write parts of their arguments alone: their bytes are not known."""


class _Key(NamedTuple):
    op: str
    source: int
    module: str
    phase: str
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    out_shapes: tuple[tuple[int, ...], ...]


class OperatorRows:
    """Sums by operator, line, module, phase and shapes. `has_convolutions` when FLOP are missing for them."""

    def __init__(self, step: HostStep, activity: Activity | None, *, is_device_bound: bool) -> None:
        self.has_convolutions = False
        self._sums: dict[_Key, list[float]] = defaultdict(lambda: [0, 0.0, 0.0, 0])
        self._step = step
        self._on_device = _device_ns(step, activity) if activity is not None else {}
        for nesting in step.nestings.values():
            self._add(nesting)
        bound = "sum" if activity is None else "device" if is_device_bound else "host"
        self.operators = tuple(
            Operator(
                op=key.op,
                source=key.source,
                module=key.module,
                phase=cast(Phase, key.phase),
                inputs=tuple(
                    TensorSpec(shape=s, dtype=d or "unknown")
                    for s, d in zip(key.shapes or ((),), key.dtypes or ("",), strict=False)
                ),
                # Only those of convolutions are known; nearly all operators' results have the dtype of what they read.
                outputs=tuple(TensorSpec(shape=s, dtype=_first_dtype(key)) for s in key.out_shapes or ((),)),
                num_calls=num,
                op_s=op_ns * 1e-9,
                python_s=host_ns * 1e-9,
                flop=round(flop / num),
                bytes=0
                if _PARTS.search(key.op)
                else sum(prod(s) * ELEMENT_BYTES.get(d, 1) for s, d in zip(key.shapes, key.dtypes, strict=False) if d)
                + sum(prod(s) * ELEMENT_BYTES.get(_first_dtype(key), 1) for s in key.out_shapes),
                bound=bound,  # type: ignore[arg-type]
            )
            for key, (num, op_ns, host_ns, flop) in sorted(self._sums.items(), key=lambda i: -i[1][1] - i[1][2])
        )

    def _add(self, nesting: Nesting) -> None:
        whole: set[int] = set()
        row_of_op: dict[int, int] = {}
        holds_known = _holders_of_known_flop(nesting)
        for index, event in enumerate(nesting.events):
            parent = nesting.parents[index]
            if parent in whole:
                whole.add(index)
                row_of_op[index] = row_of_op[parent]
                continue
            row_of_op[index] = index
            if not event.shapes or not is_operator(event.name):
                continue
            if _flop(event) is not None:
                whole.add(index)
            elif event.name in _WHOLE and index not in holds_known:
                whole.add(index)
                self.has_convolutions = True
        counted: set[int] = set()
        for index, row in row_of_op.items():
            event = nesting.events[row]
            if not is_operator(event.name):
                continue
            own_ns = nesting.self_ns[index]
            device_ns = self._on_device.get((event.thread, index), 0)
            is_new = row not in counted
            counted.add(row)
            sums = self._sums[self._key(nesting, row)]
            sums[0] += is_new
            sums[1] += device_ns if self._on_device else own_ns
            sums[2] += own_ns if self._on_device else 0
            sums[3] += (_flop(event) or 0) if is_new else 0

    def _key(self, nesting: Nesting, index: int) -> _Key:
        event = nesting.events[index]
        return _Key(
            operator_name(event.name),
            *self._step.origin_of(nesting, index),
            self._step.phase_at(event.start_ns),
            event.shapes,
            event.dtypes,
            event.convolved.out_shapes,
        )


def host_reads(step: HostStep, activity: Activity | None) -> tuple[HostRead, ...]:
    """Reads of single values by line, with the time in which the host waited inside them."""
    waits = activity.waits if activity is not None else []
    rows: dict[tuple[int, str, bool], list[float]] = defaultdict(lambda: [0, 0.0])
    for nesting in step.nestings.values():
        for index, event in enumerate(nesting.events):
            if event.name in _READS and step.phase_at(event.start_ns) != "optimizer":
                own = [w for w in waits if w.thread == event.thread and event.start_ns <= w.start_ns < event.end_ns]
                key = (step.source_of(nesting, index), step.phase_at(event.start_ns), bool(own))
                rows[key][0] += 1
                rows[key][1] += sum(w.end_ns - w.start_ns for w in own) * 1e-9
    return tuple(
        HostRead(source=source, call="item", calls=num, wait_s=wait_s, phase=cast(Phase, phase), on_device=on_device)
        for (source, phase, on_device), (num, wait_s) in rows.items()
    )


def _device_ns(step: HostStep, activity: Activity) -> dict[tuple[int | str, int], int]:
    """Device time by (thread, index of the innermost event at the launch)."""
    found: dict[tuple[int | str, int], int] = defaultdict(int)
    for work, call, _ in activity.linked:
        nesting = step.nestings.get(call.thread) if call is not None else None
        if call is not None and nesting is not None and (index := nesting.at(call.start_ns)) >= 0:
            found[call.thread, index] += work.end_ns - work.start_ns
    return found


def _first_dtype(key: _Key) -> str:
    return next(filter(None, key.dtypes), "unknown")


def _holders_of_known_flop(nesting: Nesting) -> set[int]:
    """Events that called, directly or not, a convolution whose FLOP are known."""
    found: set[int] = set()
    for index in reversed(range(len(nesting.events))):
        if index in found or (nesting.events[index].convolved.out_shapes and _flop(nesting.events[index]) is not None):
            found.add(nesting.parents[index])
    return found


def _flop(event: HostOp) -> int | None:
    convolved = event.convolved
    try:
        return operator_flop(event.name, event.shapes, convolved.out_shapes, is_transposed=convolved.is_transposed)
    except UsageError:
        return None
