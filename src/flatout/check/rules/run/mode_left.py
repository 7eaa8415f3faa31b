"""A module runs in the wrong mode: training mode in evaluation, or evaluation mode in training.

Costs        Wrong figures rather than time: dropout makes validation worse than it is and batch norm learns from the validation
             set; in the other direction nothing is dropped and no statistics are learnt.
Evidence     Root modules with active dropout or batch norm whose calls in a loop of their own never lead to a backward although
             the same module is trained elsewhere; or trained modules called in evaluation mode.
Levers       graph.set-mode
False alarm  Dropout kept on purpose to estimate uncertainty; batch norm frozen on purpose while fine-tuning. A generator that
             runs without gradients inside the training loop is left alone.
"""

from __future__ import annotations

from collections.abc import Iterator

from flatout.core.parts import rule
from flatout.core.records.evidence import Evidence, Model
from flatout.core.records.finding import Note
from flatout.core.records.usage import ModuleFact
from flatout.machine.cost.accounting import facts_named, loops_around


def note(evidence: Evidence) -> Iterator[Note]:
    """Yield a note for each line that calls a module in the wrong mode."""
    for fact in facts_named(evidence, "train-in-eval"):
        if _has_own_loop(evidence, fact):
            yield Note(
                where=evidence.source_of(fact.source),
                text=f"{fact.module} is evaluated here in training mode with {fact.text} active; call .eval() before and "
                ".train() after",
            )
    for fact in facts_named(evidence, "eval-in-train"):
        yield Note(
            where=evidence.source_of(fact.source),
            text=f"{fact.module} is trained here in evaluation mode, so {fact.text} do nothing; call .train() unless they "
            "are frozen on purpose",
        )


def _has_own_loop(evidence: Evidence, fact: ModuleFact) -> bool:
    """Whether the innermost loop around the call is another than the one around the training's update."""
    inner = [o.source for o in evidence.optimizers] + list(evidence.backward_sources)
    training = {next(loops_around(evidence, source), None) for source in inner}
    model = next((m for m in evidence.models if m.source == fact.source and m.name == fact.module), None)
    loop = _innermost_loop(evidence, model) if model is not None else None
    return loop is not None and loop not in training


def _innermost_loop(evidence: Evidence, model: Model) -> tuple[str, int] | None:
    for index in (model.source, *model.callers):
        line = evidence.source_of(index)
        if line is not None and line.loops:
            return line.file, line.loops[-1]
    return None


RULE = rule(__name__, note=note, title="A module runs in the wrong mode")
