"""As many compute threads as suit the cores and the work.

What        `torch.set_num_threads(n)` before the script begins; later calls of the script have no effect.
Guarantee   BOUNDED: reductions are split among the threads.
Refuses     Devices other than the CPU, and a number that is right already.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

import libcst as cst

from flatout.errors import EditError
from flatout.levers.syntax.calls import argument, calls_of, with_calls
from flatout.levers.syntax.imports import with_torch
from flatout.levers.syntax.source import parsed
from flatout.levers.syntax.starting import with_start
from flatout.records.evidence import Evidence
from flatout.records.finding import Finding
from flatout.records.lever import Candidate, Lever, Parameters, Refusal, Seams, integer

_SMALL_S: Final = 50e-6
"""Waking threads and waiting for the last takes a few microseconds: an operator that is done in tens of them gains little."""
_MOSTLY: Final = 0.6
_MOST_OF_SMALL: Final = 0.3
_WAKING: Final = 0.2
"""Small operators may take so much longer without a second thread, on two cores."""


def propose(evidence: Evidence, findings: Sequence[Finding]) -> Iterator[Candidate | Refusal]:
    """All cores where fewer are used; one thread where operators are small."""
    now, cores = evidence.workload.num_threads, evidence.workload.num_cores
    if evidence.workload.device != "cpu":
        yield Refusal(lever=LEVER.id, because=f"the work is done by {evidence.workload.device}")
        return
    small_s = sum(o.op_s for o in evidence.operators if o.num_calls and o.op_s / o.num_calls < _SMALL_S)
    large_s = sum(o.op_s for o in evidence.operators) - small_s
    is_small = small_s > _MOSTLY * (small_s + large_s)
    wanted = [n for n in dict.fromkeys((cores, 1) if is_small else (cores,)) if n != now]
    if not wanted:
        why = "most operators are large enough to be shared" if now > 1 else "there is no other to choose"
        yield Refusal(lever=LEVER.id, because=f"{now} thread(s) on {cores} core(s), and {why}")
    for number in wanted:
        told = [f.saved_s for f in findings] if number == cores else []
        most_s = _MOST_OF_SMALL * small_s if number == 1 else 0.5 * evidence.steps.step_s
        guess = (
            -max(0.0, now / number - 1) * large_s - _WAKING * small_s,
            most_s,
        )  # large operators lose their threads
        yield Candidate(
            lever=LEVER.id,
            parameters={"num_threads": number},
            saved_s=max(told, default=guess),
            because=f"torch uses {now} thread(s) on {cores} core(s)",
        )


def apply(seams: Seams, parameters: Parameters) -> None:
    """Set the number, and leave it."""
    import torch

    number = integer(parameters, "num_threads")

    def start() -> Callable[[], None]:
        before, original = torch.get_num_threads(), torch.set_num_threads
        original(number)
        seams.replace(torch, "set_num_threads", lambda _: None)
        seams.note(LEVER.id)
        return lambda: original(before)

    seams.at_start(start)


def edit(text: str, parameters: Parameters) -> str:
    """`torch.set_num_threads(n)` where the script starts, or another number where it sets one."""
    number = integer(parameters, "num_threads")
    module = parsed(text)
    told = calls_of(module, ("torch.set_num_threads",))
    if len(told) > 1:
        raise EditError(f"the number of threads is set in {len(told)} places")
    if not told:
        module, torch = with_torch(module)
        return with_start(module, f"{torch}.set_num_threads({number})\n").code
    if argument(told[0], "", 0) is None:
        raise EditError("torch.set_num_threads is called without a number")
    value = cst.Integer(str(number))
    return with_calls(module, told, lambda call: call.with_changes(args=[call.args[0].with_changes(value=value)])).code


LEVER = Lever(
    id="parallelism.thread-count",
    title="Number of compute threads",
    guarantee="bounded",
    module=__name__,
    propose=propose,
    apply=apply,
    edit=edit,
)
