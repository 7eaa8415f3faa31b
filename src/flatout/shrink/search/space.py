"""A space of architectures: names, and for each a range of numbers or a list of values."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice, product
from typing import Any, Final, NamedTuple, TypeAlias

from flatout.core.errors import UsageError
from flatout.core.records.architecture_search import SpaceValue

_MOST_LISTED: Final = 100_000
"""Choices that are gone through one by one to find one that was not tried."""
_DRAWS: Final = 200


class Range(NamedTuple):
    """Numbers from `low` to `high`, both included; whole ones if both ends are, in steps of `step`.

    `log`: drawn evenly in the logarithm.
    """

    low: float
    high: float
    step: int = 1
    log: bool = False

    @property
    def is_whole(self) -> bool:
        return isinstance(self.low, int) and isinstance(self.high, int)


Space: TypeAlias = Mapping[str, Range | Sequence[SpaceValue]]


def checked_space(space: Space) -> Space:
    """The space itself. Raises UsageError for an empty one, or a range or list that holds nothing."""
    if not space:
        raise UsageError("the space is empty; give names, each with a Range or a list of choices")
    for name, values in space.items():
        if isinstance(values, Range):
            is_wrong = not values.low <= values.high or values.step < 1 or (values.log and values.low <= 0)
            is_wrong = is_wrong or (values.is_whole and values.log and values.step != 1)
            if is_wrong:
                raise UsageError(
                    f"'{name}' is {values}; give low <= high, a step of 1 or more, and a low above 0 with log"
                )
        elif isinstance(values, str) or not values or len(set(values)) != len(values):
            raise UsageError(f"'{name}' is {values!r}; give a Range, or a list of choices that differ")
    return space


def architecture_key(architecture: Mapping[str, SpaceValue]) -> str:
    """The same for equal choices."""
    return json.dumps(dict(architecture), sort_keys=True)


def spelled(space: Space) -> dict[str, object]:
    """The space as JSON holds it, to tell whether two searches are one."""
    return {name: list(values) for name, values in sorted(space.items())}


def distributions(space: Space) -> dict[str, Any]:
    """The space in Optuna's distributions, by name."""
    from optuna import distributions as kinds

    found: dict[str, Any] = {}
    for name, values in space.items():
        if not isinstance(values, Range):
            found[name] = kinds.CategoricalDistribution(list(values))
        elif values.is_whole:
            high = int(values.low) + (int(values.high) - int(values.low)) // values.step * values.step
            found[name] = kinds.IntDistribution(int(values.low), high, log=values.log, step=values.step)
        else:
            found[name] = kinds.FloatDistribution(values.low, values.high, log=values.log)
    return found


def untried(space: Space, tried: set[str], *, seed: int) -> dict[str, SpaceValue] | None:
    """A choice whose key is not among those tried; None when there is none, or none was found in a space that has no end."""
    draw = random.Random(seed)
    for _ in range(_DRAWS):
        architecture = {name: _drawn(values, draw) for name, values in space.items()}
        if architecture_key(architecture) not in tried:
            return architecture
    return next((c for c in islice(_all(space), _MOST_LISTED) if architecture_key(c) not in tried), None)


def _drawn(values: Range | Sequence[SpaceValue], draw: random.Random) -> SpaceValue:
    if isinstance(values, Range) and not values.is_whole:
        return draw.uniform(values.low, values.high)
    return draw.choice(_listed(values))


def _all(space: Space) -> Iterator[dict[str, SpaceValue]]:
    if any(isinstance(values, Range) and not values.is_whole for values in space.values()):
        return
    for values in product(*(_listed(v) for v in space.values())):
        yield dict(zip(space, values, strict=True))


def _listed(values: Range | Sequence[SpaceValue]) -> Sequence[SpaceValue]:
    if isinstance(values, Range):
        return range(int(values.low), int(values.high) + 1, values.step)
    return values
