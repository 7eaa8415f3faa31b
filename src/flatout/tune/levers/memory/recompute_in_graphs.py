"""Compiled code computes cheap operators again in the backward instead of keeping their results.

What        Three rules of thumb of torch.compile's partitioner turned off (`torch._functorch.config.ban_recompute_*`), by which
            it keeps pointwise results for the backward that it could compute again from what is kept anyway: norms, gates,
            sums of residuals. Products, convolutions, attention, reductions and random numbers are not computed again.
            With `"chains": false` it keeps what long chains lead to, as sums of residuals.
Guarantee   BOUNDED: what is computed again is rounded less often on the way.
Refuses     Scripts that keep little for the backward. Where a script compiles nothing, it is tried without chains beside
            `graph.compile`, and kept in a plan if a step is smaller and no slower.
Costs       Time, for pointwise operators that read and write memory once more. Five models kept 0.48 to 0.64 of the bytes for
            the backward, at 0.95 to 1.15 times the speed (two EPYC cores, torch 2.13, `bench/recompute_in_graphs.py`). It is
            for memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Final

from flatout.core.errors import EditError, LeverRefused
from flatout.core.parts import lever
from flatout.core.records.evidence import Evidence
from flatout.core.records.finding import Finding
from flatout.core.records.lever import Candidate, Hooks, Parameters
from flatout.machine.cost.families import COMPILED_GRAPH, family_of
from flatout.machine.cost.iterations import element_bytes
from flatout.tune.rewrite.imports import with_import, with_start
from flatout.tune.rewrite.source import parsed

_SAVED: Final = 0.4
"""Of these bytes: five models kept 36 to 52 % less (bench/results, recompute_in_graphs)."""
_SAVED_FEWER: Final = 0.1
"""Of what cheap operators return, without chains: our guess, of which part is fused away and part is kept."""
_CHEAP: Final = ("pointwise operators", "normalisation")
_LITTLE: Final = 8 << 20
"""Bytes: less is nothing beside a process."""
_MAY_COST: Final = 0.05
"""Of a step: a BERT with dropout, the most of the five models."""
_EFFORT: Final = 5.0
"""Compiled code is made anew: as for graph.compile."""


def propose(evidence: Evidence, findings: Sequence[Finding]) -> Iterator[Candidate]:
    """Propose it for training scripts whose compiled graphs keep much for the backward."""
    if evidence.steps.kind != "training":
        raise LeverRefused("the script does not train")
    if evidence.compilation is None or not evidence.compilation.num_graphs:
        yield from _beside_compiling(evidence)
        return
    num_bytes = _left_for_backward(evidence)
    if num_bytes < _LITTLE:
        raise LeverRefused(f"compiled graphs keep {max(0, num_bytes) / 2**20:.1f} MiB for the backward")
    yield Candidate(
        saved_s=(-_MAY_COST * evidence.steps.step_s, 0.0),
        saved_bytes=round(_SAVED * num_bytes),
        because=f"compiled graphs keep {num_bytes / 2**20:.0f} MiB for the backward, part of it cheap to compute again",
    )


def _beside_compiling(evidence: Evidence) -> Iterator[Candidate]:
    """What it would do to a script that the plan compiles, by the results of pointwise operators and norms in its forward."""
    num_bytes = round(
        sum(
            o.num_calls * t.num_elements * element_bytes(t.dtype)
            for o in evidence.operators
            if o.phase == "forward" and family_of(o.op) in _CHEAP
            for t in o.outputs[:1]
        )
    )
    if num_bytes < _LITTLE:
        raise LeverRefused("the script compiles nothing, and cheap operators keep little for the backward")
    yield Candidate(
        parameters={"chains": False},
        saved_s=(-_MAY_COST * evidence.steps.step_s, 0.0),
        saved_bytes=round(_SAVED_FEWER * num_bytes),
        beside=("graph.compile",),
        because=f"cheap operators of the forward return {num_bytes / 2**20:.0f} MiB, part of which compiled code keeps for the "
        "backward",
    )


def _left_for_backward(evidence: Evidence) -> int:
    """Bytes that graphs of the backward take beside what those of the forward took: weights, and the batch."""
    graphs = [o for o in evidence.operators if o.op == COMPILED_GRAPH]
    sizes = {
        phase: sum(
            o.num_calls * t.num_elements * element_bytes(t.dtype) for o in graphs if o.phase == phase for t in o.inputs
        )
        for phase in ("forward", "backward")
    }
    return round(sizes["backward"] - sizes["forward"])


def apply(hooks: Hooks, parameters: Parameters) -> None:
    """Turn the rules off before the script's first line."""
    from flatout.blocks.training.recompute_in_graphs import recompute_cheap_operators

    hooks.at_start(partial(recompute_cheap_operators, chains=bool(parameters.get("chains", True))))
    hooks.note(LEVER.id)


def edit(text: str, parameters: Parameters) -> str:
    """Write the call at the start of the script."""
    if "recompute_cheap_operators" in text or "ban_recompute" in text:
        raise EditError("the file sets what is computed again itself")
    module = with_import(parsed(text), "flatout.blocks.training.recompute_in_graphs", "recompute_cheap_operators")
    chains = "" if parameters.get("chains", True) else "chains=False"
    return with_start(module, f"recompute_cheap_operators({chains})\n").code


LEVER = lever(
    __name__, propose, apply=apply, edit=edit, effort=_EFFORT, title="Cheap operators recomputed in compiled code"
)
