"""What a lever is, what it would do to a run, and how it stands in a plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from flatout.core.errors import PlanError
from flatout.core.records.evidence import Evidence
from flatout.core.records.finding import Finding
from flatout.core.records.record import Record
from flatout.core.records.verdict import Guarantee
from flatout.core.records.workload import Source

Parameter = bool | int | float | str | tuple[str, ...]
Parameters = dict[str, Parameter]


class Candidate(Record, frozen=True, kw_only=True):
    """A lever with parameters that could be applied: `saved_s` is (low, high), the seconds it would save per step; `where` is
    the source line that it changes. `core.parts.lever` fills in `lever`, the id.
    """

    lever: str = ""
    parameters: Parameters = {}
    saved_s: tuple[float, float]
    saved_bytes: int = 0
    where: Source | None = None
    warm_up_steps: int = 0
    """Steps until it has its full effect: a cache that fills in the first epoch."""
    guarantee: Guarantee | None = None
    """What it can promise for this run where that is weaker than what its lever does."""
    first_below_s: float = 0.0
    """Once a step takes less than this, the first of the ways to pull its lever that is tried."""
    is_companion: bool = False
    """Whether it gains nothing alone: it takes away what would limit the step once others have made it faster."""
    is_risky: bool = False
    """Whether it may well compute something else here: it is tried alone, so that others do not fail with it."""
    fallback_for: tuple[str, ...] = ()
    """Words: it is tried only once another way to pull its lever failed with one of them in its error, or differed first in what
    one of them names ('gradient': that is looked for in no error), and ways that are no fallback are not tried then."""
    replaces: tuple[str, ...] = ()
    """Levers whose work it does as well: they are tried behind it, and do not stand in a plan beside it."""
    beside: tuple[str, ...] = ()
    """Levers on whose work alone it acts: it is tried in the end, if one of them is in the plan, and kept where a step is
    smaller and no slower."""
    because: str


class Refusal(Record, frozen=True, kw_only=True):
    """The reason why a lever does not apply to a script."""

    lever: str = ""
    because: str


class PlannedLever(Record, frozen=True, kw_only=True):
    """A lever of a plan, with its parameters, its guarantee, and the predicted and the measured speed-up.

    Both are ratios of the step with the levers before it to the step with this one too: `predicted` is (low, high), `measured` is
    (median, low, high); None where it was not predicted or measured.
    """

    id: str
    guarantee: Guarantee
    parameters: Parameters = {}
    predicted: tuple[float, float] | None = None
    measured: tuple[float, float, float] | None = None
    warm_up_steps: int = 0
    because: str = ""


Undo = Callable[[], None]


class Hooks(Protocol):
    """Points of a script's run at which a lever can register a change: see `flatout.tune.script_hooks`.

    `Any` stands for an `nn.Module`: this file imports no torch.
    """

    def at_start(self, change: Callable[[], Undo]) -> None:
        """Call `change` before the script's first line; it returns how to undo what it did."""

    def at_construction(self, kind: type, change: Callable[[type, dict[str, Any]], None]) -> None:
        """Call `change` before each constructor of `kind`, with the class and its arguments by name, which it may change."""

    def at_first_call(self, change: Callable[[Any], Undo | None]) -> None:
        """Call `change` with each root module that has parameters before its first call; it may return how to undo."""

    def around_calls(self, context: Callable[[Any], AbstractContextManager[object] | None]) -> None:
        """Enter this context around every call of a root module that has parameters."""

    def on_inputs(self, change: Callable[[Any, Any], Any]) -> None:
        """Pass (args, kwargs) of every call of a root module that has parameters through `change`."""

    def in_place_of_calls(self, call: Callable[[Any, Callable[..., Any], Any, Any], Any]) -> None:
        """Have `call(module, original, args, kwargs)` compute what a call of a root module with parameters returns."""

    def on_outputs(self, change: Callable[[Any, Any], Any]) -> None:
        """Pass what every call of a root module that has parameters returns through `change`."""

    def replace(self, owner: object, name: str, value: object) -> None:
        """Replace an attribute of torch or of the script until everything is undone."""

    def at_source(self, file: str, change: Callable[[str], str]) -> None:
        """Change the text of a file before it is compiled; `file` is relative to the script's folder."""

    def note(self, what: str) -> None:
        """Record that a change has really been made, by the lever's id."""


def _one_loss(parameters: Parameters) -> int:
    return 1


class Lever(Record, frozen=True, kw_only=True):
    """One explicit change to a run, made from outside, that can be undone.

    `propose` reads Evidence and the findings that name the lever as their cure, and yields candidates, the most promising first,
    or why it does not apply. `apply` registers its changes with the hooks of a script that is about to run; the hooks undo them.
    `environment` returns variables that must be set before the process starts. `conflicts` are ids of levers that cannot be in
    the same plan.

    `edit` is the change that a person would make: it takes the text of a file (the one that the parameter `file` names, else the
    script) and returns the changed text, or raises EditError where that is not certain. Without `apply` the lever is this edit,
    made in memory. A lever that `is_local` is applied at one place of the source, named by the parameters `file`, `function` and
    `code`, and may be in a plan once for each place. `effort` is how many times longer a trial takes than that of other levers,
    as a function where it depends on the parameters (`effort_with`).
    `dtype` returns the coarsest precision to which the lever rounds numbers: BOUNDED is then measured against it. `errors` are
    words in the errors of scripts that do not go with it: by them it is found among several that were tried as one. `num_losses`
    says how many losses of the script one with the lever stands for, where that is not one: 0 where they cannot be compared.
    """

    id: str
    title: str
    guarantee: Guarantee
    module: str
    propose: Callable[[Evidence, Sequence[Finding]], Iterator[Candidate | Refusal]]
    apply: Callable[[Hooks, Parameters], None] | None = None
    environment: Callable[[Parameters], Mapping[str, str]] | None = None
    conflicts: tuple[str, ...] = ()
    edit: Callable[[str, Parameters], str] | None = None
    is_local: bool = False
    effort: float | Callable[[Parameters], float] = 1.0
    dtype: Callable[[Parameters], str] | None = None
    errors: tuple[str, ...] = ()
    num_losses: Callable[[Parameters], int] = _one_loss

    def effort_with(self, parameters: Parameters) -> float:
        """How many times longer a trial with these parameters takes than that of other levers."""
        return self.effort(parameters) if callable(self.effort) else self.effort


def integer(parameters: Parameters, name: str) -> int:
    """A lever's parameter that must be a whole number.

    Raises PlanError when it is missing or something else: a person may have written it.
    """
    value = parameters.get(name)
    if isinstance(value, bool) or not isinstance(value, int):
        raise PlanError(f"parameter '{name}' is {value!r} and must be a whole number; see what `flatout tune` writes")
    return value


def string(parameters: Parameters, name: str) -> str:
    """A lever's parameter that must be a text.

    Raises PlanError when it is missing or something else: a person may have written it.
    """
    value = parameters.get(name)
    if not isinstance(value, str):
        raise PlanError(f"parameter '{name}' is {value!r} and must be a text; see what `flatout tune` writes")
    return value
