"""The number of compute threads that suits the cores and the work.

What        `torch.set_num_threads(n)` before the script begins; later calls of the script have no effect.
Guarantee   BOUNDED: reductions are split among the threads.
Refuses     Devices other than the CPU, and a number that is right already.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

import libcst as cst

from flatout.core.errors import EditError, LeverRefused
from flatout.core.parts import lever
from flatout.core.records.evidence import Evidence
from flatout.core.records.finding import Finding
from flatout.core.records.lever import Candidate, Hooks, Parameters, integer
from flatout.tune.rewrite.calls import argument, calls_to, with_calls
from flatout.tune.rewrite.imports import with_start, with_torch
from flatout.tune.rewrite.source import parsed

_SMALL_S: Final = 50e-6
"""Waking threads and waiting for the last takes a few microseconds: an operator that is done in tens of them gains little."""
_MOSTLY: Final = 0.6
_MOST_OF_SMALL: Final = 0.3
_WAKING: Final = 0.2
"""Small operators may take so much longer without a second thread, on two cores."""


def propose(evidence: Evidence, findings: Sequence[Finding]) -> Iterator[Candidate]:
    """Propose all cores where fewer are used, and one thread where operators are small."""
    now, cores = evidence.workload.num_threads, evidence.workload.num_cores
    if evidence.workload.device != "cpu":
        raise LeverRefused(f"the work is done by {evidence.workload.device}")
    small_s = sum(o.op_s for o in evidence.operators if o.num_calls and o.op_s / o.num_calls < _SMALL_S)
    large_s = sum(o.op_s for o in evidence.operators) - small_s
    is_small = small_s > _MOSTLY * (small_s + large_s)
    wanted = [n for n in dict.fromkeys((cores, 1) if is_small else (cores,)) if n != now]
    if not wanted:
        why = "most operators are large enough to be shared" if now > 1 else "there is no other to choose"
        raise LeverRefused(f"{now} thread(s) on {cores} core(s), and {why}")
    for number in wanted:
        savings = [f.saved_s for f in findings] if number == cores else []
        most_s = _MOST_OF_SMALL * small_s if number == 1 else 0.5 * evidence.steps.step_s
        guess = (
            -max(0.0, now / number - 1) * large_s - _WAKING * small_s,
            most_s,
        )  # large operators lose their threads
        yield Candidate(
            parameters={"num_threads": number},
            saved_s=max(savings, default=guess),
            because=f"torch uses {now} thread(s) on {cores} core(s)",
        )


def apply(hooks: Hooks, parameters: Parameters) -> None:
    """Set the number of threads; later calls of the script have no effect."""
    import torch

    number = integer(parameters, "num_threads")

    def start() -> Callable[[], None]:
        before, original = torch.get_num_threads(), torch.set_num_threads
        original(number)
        hooks.replace(torch, "set_num_threads", lambda _: None)
        hooks.note(LEVER.id)
        return lambda: original(before)

    hooks.at_start(start)


def edit(text: str, parameters: Parameters) -> str:
    """Write `torch.set_num_threads(n)` where the script starts, or another number where it sets one."""
    number = integer(parameters, "num_threads")
    module = parsed(text)
    savings = calls_to(module, ("torch.set_num_threads",))
    if len(savings) > 1:
        raise EditError(f"the number of threads is set in {len(savings)} places")
    if not savings:
        module, torch = with_torch(module)
        return with_start(module, f"{torch}.set_num_threads({number})\n").code
    if argument(savings[0], "", 0) is None:
        raise EditError("torch.set_num_threads is called without a number")
    value = cst.Integer(str(number))
    return with_calls(
        module, savings, lambda call: call.with_changes(args=[call.args[0].with_changes(value=value)])
    ).code


LEVER = lever(__name__, propose, apply=apply, edit=edit, title="Number of compute threads")
