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

from flatout.cost.accounting import result_of
from flatout.records.compilation import Compilation
from flatout.records.evidence import Evidence
from flatout.records.finding import Finding, Note, Rule
from flatout.records.trial import TimeModel, TrialResult
from flatout.records.workload import Source

_SLOWER: Final = 0.92
"""Eager must take at most this share of the compiled call before it is called faster: trials repeat to some percent."""
_FASTER: Final = 1.05


def propose(evidence: Evidence) -> Iterator[TimeModel]:
    """Time each compiled module of the steps without its compiled code."""
    if evidence.compilation is not None and not _has_limit(evidence.compilation):
        yield from _trials(evidence)


def check(evidence: Evidence) -> Iterator[Finding]:
    """Yield one finding per compiled module that is faster without."""
    for trial, result in _results(evidence):
        kept = (result.cured_s or 0.0) / (result.now_s or 1.0)
        if kept > _SLOWER:
            continue
        cost_s = min(_calls(evidence, trial) * (result.now_s or 0.0), evidence.steps.whole_s)
        saved_s = cost_s * (1 - kept)
        yield Finding(
            rule=RULE.id,
            regime="overhead",
            where=_where(evidence, trial),
            cost_s=cost_s,
            saved_s=(0.7 * saved_s, saved_s),
            because=f"{evidence.models[trial.model].name} takes {(result.now_s or 0) * 1e3:.2f} ms a call compiled and "
            f"{(result.cured_s or 0) * 1e3:.2f} ms eager (tried)"
            + (f"; compiling took {evidence.compilation.compile_s:.1f} s" if evidence.compilation else ""),
            edit="remove torch.compile here, or give it more work at once (a larger batch)",
            levers=RULE.levers,
            basis="trial",
        )


def note(evidence: Evidence) -> Iterator[Note]:
    """Yield a note where the run ended before compiling had paid for itself."""
    compilation = evidence.compilation
    if compilation is None or not evidence.exit:
        return
    saved_s = sum(_calls(evidence, t) * ((r.cured_s or 0.0) - (r.now_s or 0.0)) for t, r in _results(evidence))
    is_faster = any((r.cured_s or 0.0) > _FASTER * (r.now_s or 0.0) for _, r in _results(evidence))
    if not is_faster or saved_s <= 0:
        return
    steps = compilation.compile_s / saved_s
    if steps > evidence.steps.num_seen:
        yield Note(
            rule=RULE.id,
            where=evidence.source_of(compilation.compiled_at[0]) if compilation.compiled_at else None,
            text=f"compiling took {compilation.compile_s:.1f} s and saves {saved_s * 1e3:.2f} ms a step (tried): it pays from "
            f"step {steps:.0f} on; {evidence.steps.num_seen} steps were seen",
        )


def _results(evidence: Evidence) -> Iterator[tuple[TimeModel, TrialResult]]:
    for trial in _trials(evidence):
        result = result_of(evidence, trial)
        if result is not None:
            yield trial, result


def _trials(evidence: Evidence) -> Iterator[TimeModel]:
    if evidence.compilation is None:
        return
    for index, model in enumerate(evidence.models):
        if model.calls * model.call_s > 0:
            yield TimeModel(model=index, variant="eager", backward=model.num_graphs_used > 0)


def _calls(evidence: Evidence, trial: TimeModel) -> float:
    return evidence.models[trial.model].calls


def _where(evidence: Evidence, trial: TimeModel) -> Source | None:
    compilation = evidence.compilation
    if compilation is not None and len(compilation.compiled_at) == 1:
        return evidence.source_of(compilation.compiled_at[0])
    return evidence.source_of(evidence.models[trial.model].source)


def _has_limit(compilation: Compilation) -> bool:
    """After a limit the function runs eagerly, and there is nothing to compare."""
    return any(e.kind == "limit" for e in compilation.events)


RULE = Rule(
    id="run.compile-never-pays",
    title="Compiling does not pay",
    module=__name__,
    check=check,
    propose=propose,
    note=note,
    levers=("graph.compile-off",),
)
