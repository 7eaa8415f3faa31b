"""What a reduction is: one way to make a model cheaper, at a price in accuracy that is measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final, Literal

from flatout.core.records.lever import Parameters
from flatout.core.records.record import Record
from flatout.core.records.verdict import Guarantee

Kind = Literal["training", "size", "recovery", "bits", "engine"]
KINDS: Final[tuple[Kind, ...]] = ("training", "size", "recovery", "bits", "engine")
"""How a reduction makes a model cheaper, in the order in which they come into a composition, at most one of each: fewer trained
parameters; fewer of them in all; training that brings the metric back; fewer bits; and what runs it."""


class Option(Record, frozen=True, kw_only=True):
    """One way to apply a reduction: its name in a table, the parameters, and why it may help.

    `step` orders the options of one reduction from the mildest on: where one loses too much, those after it are not tried.
    """

    reduction: str
    name: str
    parameters: Parameters = {}
    because: str = ""
    step: int = 0


class ReductionRefusal(Record, frozen=True, kw_only=True):
    """Why a reduction does not apply to a model."""

    reduction: str
    because: str


class AppliedReduction(Record, frozen=True, kw_only=True):
    """A reduction of a composition: with which parameters, under which guarantee, and why it was tried."""

    id: str
    guarantee: Guarantee
    parameters: Parameters = {}
    because: str = ""


class Reduction(Record, frozen=True, kw_only=True):
    """One explicit way to make a model cheaper. `flatout shrink` composes these.

    `options` looks at a `flatout.shrink.candidate.CandidateModel` and yields ways to apply the reduction, or why it does not
    apply; `apply` returns another candidate and leaves the one it was given as it was. It raises an error of flatout's where it
    cannot.
    """

    id: str
    title: str
    guarantee: Guarantee
    module: str
    kind: Kind
    options: Callable[[Any], Iterator[Option | ReductionRefusal]]
    apply: Callable[[Any, Parameters], Any]
