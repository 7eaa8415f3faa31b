"""What a lever is, what it would do to a run, and how it stands in a plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final, Literal, Protocol

from flatout.errors import PlanError
from flatout.records.evidence import Evidence
from flatout.records.finding import Finding
from flatout.records.record import Record
from flatout.records.verdict import Guarantee
from flatout.records.workload import Source

Parameter = bool | int | float | str | tuple[str, ...]
Parameters = dict[str, Parameter]


class Candidate(Record, frozen=True, kw_only=True):
    """One way to pull a lever. `saved_s` is (low, high): what it would take off a step; `where` the line it speaks of."""

    lever: str
    parameters: Parameters = {}
    saved_s: tuple[float, float]
    saved_bytes: int = 0
    where: Source | None = None
    because: str


class Refusal(Record, frozen=True, kw_only=True):
    """Why a lever does not apply here."""

    lever: str
    because: str


Kind = Literal["training", "size", "recovery", "bits", "engine"]
KINDS: Final[tuple[Kind, ...]] = ("training", "size", "recovery", "bits", "engine")
"""How a lever makes a model cheaper, in the order in which they come into a composition, at most one of each: fewer trained
parameters; fewer of them in all; training that brings the metric back; fewer bits; and what runs it."""


class Offer(Record, frozen=True, kw_only=True):
    """One way to pull a lever on a model: its name in a table, the parameters, and why it may help.

    `rung` orders offers of one lever from the mildest on: where one loses too much, those above it are not tried.
    """

    lever: str
    name: str
    parameters: Parameters = {}
    because: str = ""
    rung: int = 0


class Reduction(Record, frozen=True, kw_only=True):
    """How a lever makes a model cheaper, at a price in accuracy that is measured. `flatout shrink` composes these.

    `offers` looks at a `flatout.levers.subjects.Subject` and yields ways to pull the lever, or why it does not apply; `apply`
    returns another subject and leaves the one it was given as it was. It raises an error of flatout's where it cannot.
    """

    kind: Kind
    offers: Callable[[Any], Iterator[Offer | Refusal]]
    apply: Callable[[Any, Parameters], Any]


class PlannedLever(Record, frozen=True, kw_only=True):
    """A lever of a plan: with which parameters, under which guarantee, what was predicted and what was measured.

    `predicted` and `measured` are speed-ups of the whole step over the step with the levers before it: (low, high), and (median,
    low, high); None where it was not predicted or measured.
    """

    id: str
    guarantee: Guarantee
    parameters: Parameters = {}
    predicted: tuple[float, float] | None = None
    measured: tuple[float, float, float] | None = None
    because: str = ""


Undo = Callable[[], None]


class Seams(Protocol):
    """The places at which a lever can change a script that runs: see `flatout.levers.seams`. `Any` stands for modules."""

    def at_start(self, change: Callable[[], Undo]) -> None:
        """Before the script's first line; the change returns how to undo it."""

    def at_making(self, kind: type, change: Callable[[type, dict[str, Any]], None]) -> None:
        """Whenever an object of `kind` is made: told its class and its arguments by name, which may be changed."""

    def at_first_call(self, change: Callable[[Any], Undo | None]) -> None:
        """When a root module with parameters is called for the first time; returns how to undo it, if it did something."""

    def around_calls(self, context: Callable[[Any], AbstractContextManager[object] | None]) -> None:
        """Around every call of a root module with parameters."""

    def on_inputs(self, change: Callable[[Any, Any], Any]) -> None:
        """Of every call of a root module with parameters: (args, kwargs) in, (args, kwargs) out."""

    def on_outputs(self, change: Callable[[Any, Any], Any]) -> None:
        """Of every call of a root module with parameters: what it returned in, what the script gets out."""

    def replace(self, owner: object, name: str, value: object) -> None:
        """An attribute of torch's or the script's, until all is undone."""

    def at_source(self, file: str, change: Callable[[str], str]) -> None:
        """The text of one of the user's files before it is compiled; `file` is relative to the script's folder."""

    def note(self, what: str) -> None:
        """A change has met what it is for."""


def nothing(evidence: Evidence, findings: Sequence[Finding]) -> Iterator[Candidate | Refusal]:
    """What a lever that is not for scripts says to one."""
    return iter(())


class Lever(Record, frozen=True, kw_only=True):
    """One explicit change to a run, made from outside, that can be undone.

    `propose` looks at Evidence, and at the findings that name the lever as their cure, and yields ways to pull it, the most
    promising first, or why it does not apply. `apply` puts what it changes into the seams of a script that is about to run; the
    seams undo it. `environment` gives variables that must be there before the process starts. `conflicts` are ids of levers that
    cannot come into the same plan.

    `edit` is the change that a person would make: text of a file in (the one that the parameter `file` names, else the script),
    changed text out; it raises EditError where that is not certain. Without `apply` the lever is this edit, made in memory. A
    lever that `is_local` is pulled at one place of the source, named by the parameters `file`, `function` and `code`, and may
    come into a plan once for each place. `effort` is how many times longer it takes to try than others do. `dtype` tells the
    coarsest precision in which the lever has numbers rounded: what BOUNDED then is measured by.

    A lever with a `reduction` makes a model cheaper, not a script; it proposes nothing to scripts.
    """

    id: str
    title: str
    guarantee: Guarantee
    module: str
    propose: Callable[[Evidence, Sequence[Finding]], Iterator[Candidate | Refusal]] = nothing
    reduction: Reduction | None = None
    apply: Callable[[Seams, Parameters], None] | None = None
    environment: Callable[[Parameters], Mapping[str, str]] | None = None
    conflicts: tuple[str, ...] = ()
    edit: Callable[[str, Parameters], str] | None = None
    is_local: bool = False
    effort: float = 1.0
    dtype: Callable[[Parameters], str] | None = None


def integer(parameters: Parameters, name: str) -> int:
    """A whole number among a lever's parameters.

    Raises PlanError when it is missing or something else: a person may have written it.
    """
    value = parameters.get(name)
    if isinstance(value, bool) or not isinstance(value, int):
        raise PlanError(f"parameter '{name}' is {value!r} and must be a whole number; see what `flatout tune` writes")
    return value


def string(parameters: Parameters, name: str) -> str:
    """A text among a lever's parameters.

    Raises PlanError when it is missing or something else: a person may have written it.
    """
    value = parameters.get(name)
    if not isinstance(value, str):
        raise PlanError(f"parameter '{name}' is {value!r} and must be a text; see what `flatout tune` writes")
    return value
