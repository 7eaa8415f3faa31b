"""Where a step of a script goes, kernel by kernel, against what the device could do.

    python bench/best/account.py [--stretch] [--keys NUMBER] [--plan PLAN] OUT SCRIPT [ARGUMENTS]

The script runs unchanged, or with a plan; after WARM optimizer steps three are profiled with the shapes of operators, and the
median one stands for all. A script that has not made so many after START_S seconds, and makes no more, has them where no hook
sees them, in a CUDA graph: of that STRETCH_S seconds are profiled, and are no step. So are they with `--stretch`, for scripts
that make many steps by one graph. Graphs that torch.compile records are not, else: their kernels would have no operators. The
same kernels are launched one by one, and a race says how long a step is with graphs. OUT has a row for each operator and compiled
kernel (seconds, FLOP, bytes), and sums by family.

The floor of a row is the longer of its FLOP at the rate of a product of 8192 x 8192 x 8192 in bfloat16, or in float8 for products
of float8, and its bytes at the rate of a copy of 4 GB, all measured here after the script, on random numbers. Bytes are those of
the arrays a kernel is called with, each counted once, and twice where a compiled kernel changes it in place; of flatout's own
operators on tensors alone also those that they return. Of causal attention
half the pairs count; of FlexAttention, and of attention on packed tokens, `--keys` for each query, those that it sees on
average. Rows whose FLOP or bytes are not known count their own time. What is no kernel is idle. On a CPU, where it can be tried,
rates are those of the same operations in float32, and small.
"""

from __future__ import annotations

import json
import math
import os
import re
import signal
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch._inductor import compile_fx
from torch.optim import Optimizer
from torch.profiler import ProfilerActivity, profile, record_function

from flatout.app.plans import environment_of, read_plan, run_planned
from flatout.check.traces.events import ELEMENT_BYTES
from flatout.check.traces.ranks import evidence_of_files
from flatout.core.records.evidence import Evidence, Operator
from flatout.core.runtime.optimizer_steps import OptimizerStepHooks
from flatout.core.runtime.script import end_script, load_script, run_script
from flatout.machine.cost.families import family_of
from flatout.machine.measure.timer import time_call

WARM, STEPS = 30, 3
START_S, LOOK_S, STRETCH_S = 150.0, 5.0, 0.5
ON_GPU = torch.cuda.is_available()
NUM_ROWS = 150
"""Those furthest above their floor."""
_PACKED = ("_flash_attention_", "attention_by_dense_mask_", "attention_of_rows_")


class StepsProfiled:
    """Profiles the steps after the first WARM, each from the end of an optimizer step to the next, and ends the script then."""

    def __init__(self, trace: Path) -> None:
        self._trace, self._num, self.is_done, self.is_stretch = trace, 0, False, False
        self._num_before = 0
        self.is_finite = True
        """Whether the weights were, of the last optimizer that made a step: kernels on NaN may take less time."""
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if ON_GPU else [])]
        self._profile = profile(activities=activities, record_shapes=True)
        self._span: Any = None

    def __call__(self, optimizer: Optimizer, *_: Any) -> None:
        """Called after each optimizer step."""
        if self.is_stretch:
            return
        self._num += 1
        if self._num < WARM:
            return
        self._end_span()
        if self._num == WARM:
            self._start()
        if self._num == WARM + STEPS:
            self._stop(optimizer)
        self._begin_span()

    def on_alarm(self, *_: Any) -> None:
        """Called in the main thread when START_S have passed, then every LOOK_S while steps are met, and after the stretch."""
        if self.is_stretch:
            self._end_span()
            self._stop()
        elif self._num > self._num_before:
            self._num_before = self._num
            signal.setitimer(signal.ITIMER_REAL, LOOK_S)
        elif self._num < WARM:
            self.is_stretch = True
            self._start()
            self._begin_span()
            signal.setitimer(signal.ITIMER_REAL, STRETCH_S)

    def _start(self) -> None:
        _wait()
        self._profile.start()

    def _stop(self, optimizer: Optimizer | None = None) -> None:
        _wait()
        self._profile.stop()
        self._profile.export_chrome_trace(str(self._trace))
        groups = [] if optimizer is None else optimizer.param_groups
        weights = [p.detach() for group in groups for p in group["params"] if p.is_floating_point()]
        self.is_finite = all(bool(p.isfinite().all()) for p in weights)
        self.is_done = True
        end_script()

    def _begin_span(self) -> None:
        self._span = record_function(f"ProfilerStep#{self._num}")
        self._span.__enter__()

    def _end_span(self) -> None:
        if self._span is not None:
            self._span.__exit__(None, None, None)


def _wait() -> None:
    if ON_GPU:
        torch.cuda.current_stream().synchronize()


class Rates(NamedTuple):
    """FLOP a second of a large product, also of one in float8, and bytes a second of a large copy."""

    flop_per_s: float
    float8_flop_per_s: float
    bytes_per_s: float


def rates() -> Rates:
    """Measured here, on random numbers."""
    size, number = (8192, 2**30) if ON_GPU else (1024, 2**24)
    device, dtype = ("cuda", torch.bfloat16) if ON_GPU else ("cpu", torch.float32)
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    source = torch.randn(number, device=device)
    target = torch.empty_like(source)

    def seconds(call: Callable[[], object]) -> float:
        return time_call(call, device=device, min_time_s=0.5).call_s.value

    def scaled() -> torch.Tensor:
        return torch._scaled_mm(*small, one, one, out_dtype=dtype, use_fast_accum=True)

    flop_per_s = float8_flop_per_s = 2 * size**3 / seconds(lambda: torch.mm(a, b))
    if ON_GPU and torch.cuda.get_device_capability() >= (8, 9):
        one = torch.ones((), device=device)
        small = (a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).t())
        float8_flop_per_s = 2 * size**3 / seconds(scaled)
    return Rates(flop_per_s, float8_flop_per_s, 8 * number / seconds(lambda: target.copy_(source)))


def causal_operators(trace: Path) -> set[str]:
    """Operators of attention that were causal in all of their calls, by what the trace has of their arguments."""
    found: dict[str, bool] = {}
    for event in json.loads(trace.read_bytes())["traceEvents"]:
        name, inputs = event.get("name", ""), event.get("args", {}).get("Concrete Inputs")
        operator = getattr(torch.ops.aten, name.removeprefix("aten::"), None) if "attention" in name else None
        if operator is None or not inputs or not name.startswith("aten::"):
            continue
        arguments = [argument.name for argument in operator.default._schema.arguments]
        if "is_causal" in arguments and len(inputs) > (at := arguments.index("is_causal")):
            key = name.replace("::", ".")
            found[key] = found.get(key, True) and inputs[at] in ("True", "true")
    return {name for name, is_causal in found.items() if is_causal}


def changed_in_place(trace: Path) -> dict[str, tuple[int, ...]]:
    """Which arguments compiled kernels both read and write, by the source that the trace names: there they are in_out_ptr."""
    found: dict[str, tuple[int, ...]] = {}
    for event in json.loads(trace.read_bytes())["traceEvents"]:
        name, source = event.get("name", ""), event.get("args", {}).get("kernel_file")
        if not source or name in found or not Path(source).is_file():
            continue
        header = re.search(r"^def triton_\w*\(([^)]*)\)", Path(source).read_text(), re.MULTILINE)
        names = header[1].split(",") if header is not None else []
        found[name] = tuple(at for at, argument in enumerate(names) if argument.strip().startswith("in_out_ptr"))
    return {name: places for name, places in found.items() if places}


def bytes_in_place(operator: Operator, places: dict[str, tuple[int, ...]]) -> int:
    """Bytes of the arrays that a compiled kernel changes in place, once."""
    own = [
        operator.inputs[at] for at in places.get(operator.op.removeprefix("inductor."), ()) if at < len(operator.inputs)
    ]
    return sum(tensor.num_elements * ELEMENT_BYTES.get(tensor.dtype, 1) for tensor in own) if operator.bytes else 0


def bytes_returned(operator: Operator) -> int:
    """Bytes of what an operator of flatout's own returns, where all of its arguments are tensors; else 0."""
    namespace, _, name = operator.op.partition(".")
    found = getattr(torch.ops.flatout, name, None) if namespace == "flatout" and operator.bytes else None
    if found is None or len(found.default._schema.arguments) != len(operator.inputs):
        return 0
    results = found.default(
        *(torch.empty(t.shape, dtype=getattr(torch, t.dtype), device="meta") for t in operator.inputs)
    )
    tensors = [results] if isinstance(results, torch.Tensor) else results
    return sum(t.numel() * t.element_size() for t in tensors)


def attention_flop(operator: Operator, keys: float) -> float:
    """FLOP of a call of FlexAttention, or of attention on packed tokens, where a query sees so many keys on average; else 0.

    Two products forward, five backward. Queries are (B, H, T, D), (B, T, H, D) or (N, H, D), behind the gradient in the backward
    pass, which has their shape.
    """
    is_flex = "tem_fused" in operator.op and "flex_attention" in operator.op
    shape = operator.inputs[0].shape if operator.inputs else ()
    is_packed = any(name in operator.op for name in _PACKED) and len(shape) == 3
    if not shape or not (is_flex or is_packed):
        return 0.0
    return (5 if "backward" in operator.op else 2) * 2.0 * math.prod(operator.inputs[0].shape) * keys


def accounted(
    evidence: Evidence,
    rates: Rates,
    causal: set[str],
    in_place: dict[str, tuple[int, ...]],
    keys: float = 0.0,
) -> dict[str, Any]:
    """Rows, sums by family, and what is no kernel; operators in `causal` do half their FLOP, a query on packed tokens
    reads `keys` keys, arguments `in_place` count twice.
    """
    rows: list[dict[str, Any]] = []
    for operator in evidence.operators:
        known = bool(operator.flop or operator.bytes)
        flop = (operator.flop or 0) * (0.5 if operator.op in causal else 1.0) or attention_flop(operator, keys)
        num_bytes = operator.bytes + bytes_in_place(operator, in_place) + bytes_returned(operator)
        flop_per_s = rates.float8_flop_per_s if operator.op == "aten._scaled_mm" else rates.flop_per_s
        floor_s = operator.num_calls * max(flop / flop_per_s, num_bytes / rates.bytes_per_s)
        rows.append(
            {
                "op": operator.op,
                "family": "attention" if attention_flop(operator, 1.0) else family_of(operator.op),
                "phase": operator.phase,
                "calls": operator.num_calls,
                "s": operator.op_s,
                "floor_s": floor_s if known else operator.op_s,
                "is_known": known,
                "inputs": [list(tensor.shape) for tensor in operator.inputs[:3]],
            }
        )
    families: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for row in rows:
        sums = families[row["family"]]
        sums[0] += row["s"]
        sums[1] += min(row["s"], row["floor_s"])
        sums[2] += 0.0 if row["is_known"] else row["s"]
    step = evidence.device_step
    busy_s = step.busy_s if step is not None else sum(row["s"] for row in rows)
    return {
        "device": torch.cuda.get_device_name() if ON_GPU else "cpu",
        "torch": str(torch.__version__),
        **rates._asdict(),
        "causal": sorted(causal),
        "keys": keys,
        "counts_in_place_twice": True,
        "step_s": evidence.steps.step_s,
        "busy_s": busy_s,
        "idle_s": evidence.steps.step_s - busy_s,
        "in_rows_s": sum(row["s"] for row in rows),
        "families": {
            name: {"s": s, "floor_s": floor, "unknown_s": unknown}
            for name, (s, floor, unknown) in sorted(families.items(), key=lambda item: -item[1][0])
        },
        "rows": sorted(rows, key=lambda row: row["floor_s"] - row["s"])[:NUM_ROWS],
    }


def main() -> int:
    words = [word for word in sys.argv[1:] if word != "--stretch"]
    is_stretch = len(words) < len(sys.argv) - 1
    keys = float(words[1]) if words[0] == "--keys" else 0.0
    words = words[2:] if words[0] == "--keys" else words
    plan = read_plan(Path(words[1])) if words[0] == "--plan" else None
    out, script, *arguments = words[2:] if plan is not None else words
    wanted = environment_of(plan) if plan is not None else {}
    if any(os.environ.get(name) != value for name, value in wanted.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **wanted})
    loaded = load_script(script, tuple(arguments))
    if not is_stretch:
        compile_fx.cudagraphify = lambda compiled, *_, **__: compiled
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        steps = StepsProfiled(trace)
        listener = OptimizerStepHooks(after=None if is_stretch else steps)
        signal.signal(signal.SIGALRM, steps.on_alarm)
        signal.setitimer(signal.ITIMER_REAL, START_S)
        try:
            code = run_script(loaded).exit_code if plan is None else run_planned(plan, loaded, on_progress=print)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            listener.remove()
        if not steps.is_done:
            print(f"no {WARM + STEPS} optimizer steps were made, the exit code is {code}", file=sys.stderr)
            return code or 1
        if not steps.is_finite:
            print("weights were no finite numbers any more: that says nothing of a step", file=sys.stderr)
            return 1
        evidence, causal, in_place = evidence_of_files([trace]), causal_operators(trace), changed_in_place(trace)
    found = accounted(evidence, rates(), causal, in_place, keys) | {"is_stretch": steps.is_stretch}
    if plan is not None:
        found = {"levers": [planned.id for planned in plan.lever]} | found
    Path(out).write_text(json.dumps(found, indent=1))
    what = "stretch" if steps.is_stretch else "step"
    print(
        f"{what} {1e3 * found['step_s']:.3f} ms, busy {1e3 * found['busy_s']:.3f}, in rows {1e3 * found['in_rows_s']:.3f}"
    )
    for name, sums in found["families"].items():
        print(
            f"{name:32} {1e3 * sums['s']:9.3f} ms  floor {1e3 * sums['floor_s']:9.3f}  unknown {1e3 * sums['unknown_s']:8.3f}"
        )
    for row in found["rows"][:25]:
        print(f"  {1e6 * (row['s'] - row['floor_s']):9.0f} us over: {row['op'][:70]} x {row['calls']}, {row['inputs']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
