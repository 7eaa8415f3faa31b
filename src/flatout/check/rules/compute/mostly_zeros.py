"""Dropout or a product of a matrix that is nearly all zeros.

Costs        Random numbers are drawn for, and multiplications done with, numbers that are zero before and after.
Evidence     The share of zeros in matrices that were there before the step (features of a graph's nodes, bags of words), by
             samples of their values. Trial: dropout of the numbers that are there, a product with a sparse matrix.
Levers       none
False alarm  Features that change in every step: finding where their numbers are costs what it saves.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Literal, NamedTuple

from flatout.core.parts import rule
from flatout.core.records.evidence import Evidence
from flatout.core.records.finding import Finding
from flatout.core.records.trial import TimeMostlyZeros
from flatout.core.records.usage import ModuleFact
from flatout.machine.cost.accounting import facts_named, milliseconds
from flatout.machine.cost.suspects import proposing, tried

_WORTH_A_TRIAL: Final = 0.05
_DRAWS: Final = ("aten.bernoulli_", "aten.native_dropout")
_OF_DROPOUT: Final = (*_DRAWS, "aten.mul", "aten.div_", "aten.empty_like")
_PRODUCTS: Final = ("aten.mm", "aten.addmm")


class _Zeros(NamedTuple):
    rows: tuple[int, ...]
    trial: TimeMostlyZeros
    source: int
    share: float


def check(evidence: Evidence) -> Iterator[Finding]:
    """Yield one finding per line and what it does with the matrix."""
    for item in tried(evidence, _suspects):
        suspect, trial = item.suspect, item.suspect.trial
        work, edit = _WORDS[trial.task]
        if trial.task == "product" and _is_dropped(evidence, suspect):
            edit = _OF_DROPPED
        yield Finding(
            where=evidence.source_of(suspect.source),
            cost_s=item.cost_s,
            saved_s=(0.8 * item.saved_s, item.saved_s),
            because=f"{suspect.share:.1%} of the {trial.rows} x {trial.columns} numbers are zero; {work} of them all takes "
            f"{milliseconds(item.cost_s)} of the step, of those that are not zero {item.remaining:.0%} of that (tried)",
            edit=edit,
            operators=suspect.rows,
            basis="trial",
        )


_WORDS: Final = {
    "dropout": (
        "dropout",
        "find them once (places = x.nonzero(as_tuple=True)), then out = torch.zeros_like(x); "
        "out[places] = F.dropout(x[places], p, training)",
    ),
    "product": ("the product", "x = x.to_sparse() once before the loop, and torch.sparse.mm(x, weight)"),
}


_OF_DROPPED: Final = (
    "find the numbers once before the loop (places = x.nonzero().T, values = x[tuple(places)]); in a step, drop among them alone "
    "and multiply what is left: "
    "torch.sparse.mm(torch.sparse_coo_tensor(places, F.dropout(values, p, training), x.shape), weight)"
)


def _is_dropped(evidence: Evidence, suspect: _Zeros) -> bool:
    """Whether a matrix of this shape goes through dropout in the step: what a layer multiplies is another in each."""
    shape = (suspect.trial.rows, suspect.trial.columns)
    return any(o.op in _DRAWS and any(t.shape == shape for t in o.inputs + o.outputs) for o in evidence.operators)


def _suspects(evidence: Evidence) -> Iterator[_Zeros]:
    """Dropout and products of such matrices."""
    tasks: dict[tuple[str, int], list[ModuleFact]] = {}
    for fact in facts_named(evidence, "mostly-zeros"):
        if fact.source >= 0:
            tasks.setdefault(("dropout" if fact.kind == "aten.mul" else "product", fact.source), []).append(fact)
    for (task, source), facts in tasks.items():
        rows, columns = (int(size) for size in facts[0].text.split("x"))
        found = _dropout(evidence, source, facts[0], (rows, columns)) if task == "dropout" else None
        found = _product(evidence, source, facts[0], (rows, columns)) if task == "product" else found
        if found is not None:
            yield found


def _dropout(evidence: Evidence, source: int, fact: ModuleFact, shape: tuple[int, int]) -> _Zeros | None:
    rows = tuple(
        i
        for i, o in enumerate(evidence.operators)
        if o.source == source and o.op in _OF_DROPOUT and any(t.shape == shape for t in o.inputs + o.outputs)
    )
    if not any(evidence.operators[i].op in _DRAWS for i in rows):
        return None
    return _Zeros(
        rows, _trial("dropout", shape, fact, evidence.operators[rows[0]].outputs[0].dtype), source, fact.value
    )


def _product(evidence: Evidence, source: int, fact: ModuleFact, shape: tuple[int, int]) -> _Zeros | None:
    place = evidence.source_of(source)
    if place is None or place.via:
        return None  # a library's layer multiplies: it would have to take a sparse matrix
    rows = tuple(
        i
        for i, o in enumerate(evidence.operators)
        if o.source == source and o.op in _PRODUCTS and any(t.shape in (shape, shape[::-1]) for t in o.inputs)
    )
    forward = next((evidence.operators[i] for i in rows if evidence.operators[i].phase != "backward"), None)
    if forward is None:
        return None
    has_backward = any(evidence.operators[i].phase == "backward" for i in rows)
    trial = _trial("product", shape, fact, forward.outputs[0].dtype, forward.outputs[0].shape[-1], has_backward)
    return _Zeros(rows, trial, source, fact.value)


def _trial(
    task: Literal["dropout", "product"],
    shape: tuple[int, int],
    fact: ModuleFact,
    dtype: str,
    width: int = 1,
    backward: bool = False,
) -> TimeMostlyZeros:
    return TimeMostlyZeros(
        task=task,
        rows=shape[0],
        columns=shape[1],
        width=width,
        density=1 - fact.value,
        dtype=dtype,
        backward=backward,
    )


RULE = rule(
    __name__,
    check,
    propose=proposing(_suspects, worth=_WORTH_A_TRIAL),
    title="Work on a matrix of mostly zeros",
    rewrites_line=True,
)
