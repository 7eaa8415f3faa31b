"""Compiling takes longer than it saves, or what is compiled is slower than what is not.

Costs        Seconds of compiling at the start; where compiled code is slower (small models on a CPU, where guards and wrappers
             weigh more than fusion gains), time in every step.
Evidence     The seconds torch.compile took, and a trial: the compiled module on its captured inputs, by the code compiled already
             and without it.
Levers       graph.compile-off
False alarm  A short trial run of a long training: the number of steps until compiling has paid is told, no more.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from flatout.core.parts import rule
from flatout.core.records.evidence import Evidence
from flatout.core.records.finding import Finding, Note
from flatout.core.records.trial import TimeModel, TrialResult
from flatout.core.records.workload import Source
from flatout.machine.cost.accounting import result_of

_SLOWER: Final = 0.92
"""Eager must take at most this share of the compiled call before it is called faster: trials repeat to some percent."""
_FASTER: Final = 1.05


def propose(evidence: Evidence) -> Iterator[TimeModel]:
    """Time each compiled module of the steps without its compiled code."""
    if not evidence.compile_events("limit"):  # with a limit met the function runs eagerly: there is nothing to compare
        yield from _trials(evidence)


def check(evidence: Evidence) -> Iterator[Finding]:
    """Yield one finding per compiled module that is faster without."""
    for trial, result in _results(evidence):
        remaining = (result.cured_s or 0.0) / (result.now_s or 1.0)
        if remaining > _SLOWER:
            continue
        cost_s = min(evidence.models[trial.model].calls * (result.now_s or 0.0), evidence.steps.whole_s)
        saved_s = cost_s * (1 - remaining)
        yield Finding(
            where=_where(evidence, trial),
            cost_s=cost_s,
            saved_s=(0.7 * saved_s, saved_s),
            because=f"{evidence.models[trial.model].name} takes {(result.now_s or 0) * 1e3:.2f} ms a call compiled and "
            f"{(result.cured_s or 0) * 1e3:.2f} ms eager (tried)"
            + (f"; compiling took {evidence.compilation.compile_s:.1f} s" if evidence.compilation else ""),
            edit="remove torch.compile here, or give it more work at once (a larger batch)",
            basis="trial",
        )


def note(evidence: Evidence) -> Iterator[Note]:
    """Yield a note where the run ended before compiling had paid for itself."""
    compilation = evidence.compilation
    if compilation is None or not evidence.exit:
        return
    saved_s = sum(
        evidence.models[t.model].calls * ((r.cured_s or 0.0) - (r.now_s or 0.0)) for t, r in _results(evidence)
    )
    is_faster = any((r.cured_s or 0.0) > _FASTER * (r.now_s or 0.0) for _, r in _results(evidence))
    if not is_faster or saved_s <= 0:
        return
    steps = compilation.compile_s / saved_s
    if steps > evidence.steps.num_observed:
        yield Note(
            where=evidence.source_of(compilation.compiled_at[0]) if compilation.compiled_at else None,
            text=f"compiling took {compilation.compile_s:.1f} s and saves {saved_s * 1e3:.2f} ms a step (tried): it pays from "
            f"step {steps:.0f} on; {evidence.steps.num_observed} steps were seen",
        )


def _results(evidence: Evidence) -> Iterator[tuple[TimeModel, TrialResult]]:
    yield from ((t, r) for t in _trials(evidence) if (r := result_of(evidence, t)) is not None)


def _trials(evidence: Evidence) -> Iterator[TimeModel]:
    for index, model in enumerate(evidence.models if evidence.compilation is not None else ()):
        if model.calls * model.call_s > 0:
            yield TimeModel(model=index, variant="eager", backward=model.num_graphs_used > 0)


def _where(evidence: Evidence, trial: TimeModel) -> Source | None:
    compilation = evidence.compilation
    if compilation is not None and len(compilation.compiled_at) == 1:
        return evidence.source_of(compilation.compiled_at[0])
    return evidence.source_of(evidence.models[trial.model].source)


RULE = rule(__name__, check, propose=propose, note=note, title="Compiling does not pay")
