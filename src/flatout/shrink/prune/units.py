"""Groups of units that are alike, what each unit is worth, and which of them go."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from math import floor, gcd

import torch
from torch import Tensor, nn

from flatout.core.errors import UsageError
from flatout.shrink.prune.surgery import named_tensors
from flatout.shrink.prune.ties import Tied

Place = tuple[str, int]
"""A tensor's name and one of its dimensions."""


@dataclass(frozen=True)
class UnitGroup:
    """Units that lie in the same dimensions of the same tensors, so that one can go instead of another.

    `places` gives for each of these dimensions the indexes that a unit stands for: one channel, or all channels of a head.
    """

    name: str
    variables: tuple[int, ...]
    places: dict[Place, tuple[tuple[int, ...], ...]]
    partners: frozenset[int] = field(default_factory=frozenset)
    """Variables whose product with this group's a unit is: heads have the head's size as partner."""

    @property
    def num_units(self) -> int:
        return len(self.variables)

    def matches(self, pattern: str) -> bool:
        """Does it touch a module or a tensor of that name? `*` stands for anything."""
        names = {name for name, _ in self.places}
        names |= {name.rpartition(".")[0] for name in names}
        return fnmatchcase(self.name, pattern) or any(fnmatchcase(name, pattern) for name in names)

    def place_names(self) -> tuple[str, ...]:
        return tuple(f"{name}[{dim}]" for name, dim in self.places)


Importance = Callable[[nn.Module, UnitGroup], Sequence[float]]
"""One number a unit, in their order; the lowest go first."""


def groups_of(tied: Tied, parameters: Sequence[str]) -> list[UnitGroup]:
    """All groups that some parameter has, in the order of the parameters."""
    lies: dict[int, dict[tuple[str, int, int], list[int]]] = {}
    with_others: dict[int, set[int]] = {}
    visited: set[int] = set()
    for name in sorted(tied.named, key=lambda n: n not in parameters):  # stable: parameters, then buffers
        if id(tied.named[name]) in visited:
            continue  # one tensor under two names
        visited.add(id(tied.named[name]))
        for d, dim in enumerate(tied.named[name]):
            for i, term in enumerate(dim):
                found = tied.terms.resolve(term)
                for k, variable in enumerate(found):
                    lies.setdefault(variable, {}).setdefault((name, d, k), []).append(i)
                    with_others.setdefault(variable, set()).update(v for v in found if v != variable)
    alike: dict[tuple[tuple[str, int, int], ...], list[int]] = {}
    for variable, own in lies.items():
        if any(name in parameters for name, _, _ in own):
            alike.setdefault(tuple(own), []).append(variable)
    return _named([(key, own) for key, own in alike.items() if len(own) > 1], lies, with_others)


def _named(
    found: list[tuple[tuple[tuple[str, int, int], ...], list[int]]],
    lies: dict[int, dict[tuple[str, int, int], list[int]]],
    with_others: dict[int, set[int]],
) -> list[UnitGroup]:
    groups: list[UnitGroup] = []
    taken: dict[str, int] = {}
    for key, variables in found:
        name = key[0][0].rpartition(".")[0] or key[0][0]
        taken[name] = taken.get(name, 0) + 1
        places = {(n, d): tuple(tuple(lies[v][n, d, k]) for v in variables) for n, d, k in key}
        partners = frozenset().union(*(with_others[v] for v in variables))
        shown = name if taken[name] == 1 else f"{name}#{taken[name]}"
        groups.append(UnitGroup(shown, tuple(variables), places, partners))
    return groups


def num_remaining(group: UnitGroup, fraction: float, round_to: int) -> int:
    """How many units stay: at least the share asked for, at least one, the dimension's size a multiple of `round_to`.

    Raises UsageError for a fraction outside 0..1.
    """
    if not 0 <= fraction < 1:
        raise UsageError(f"fraction {fraction} of '{group.name}' is outside 0..1 (below 1: something has to stay)")
    width = max(1, len(next(iter(group.places.values()))[0]))
    step = round_to // gcd(round_to, width)
    wanted = group.num_units - floor(fraction * group.num_units + 1e-9)
    rounded = -(-wanted // step) * step
    return min(max(rounded, 1), group.num_units)


def removed_units(scores: Sequence[float], num: int) -> list[int]:
    """The places of the lowest scores, all but `num` of them; of equal ones the later go first.

    >>> removed_units([3.0, 1.0, 2.0], 1)
    [1, 2]
    """
    order = sorted(range(len(scores)), key=lambda i: (scores[i], -i))
    return sorted(order[: len(scores) - num])


def magnitude(model: nn.Module, group: UnitGroup) -> list[float]:
    """How large a unit's weights are: Euclidean norms of its slices, each over the mean of its tensor, added up.

    Vectors (biases, scales of norms) are left out, since they are not comparable with products; without others they count.
    """
    tensors = named_tensors(model)
    matrices = [p for p in group.places if tensors[p[0]].dim() > 1]
    places = matrices or [p for p in group.places if isinstance(tensors[p[0]], nn.Parameter)]
    total = torch.zeros(group.num_units, dtype=torch.float64)
    for place in places:
        squares = _per_unit(tensors[place[0]].detach().double() ** 2, place[1], group.places[place])
        norms = squares.sqrt()
        total += norms / max(float(norms.mean()), 1e-300)
    return [float(value) for value in total]


class Taylor:
    """What the loss would change by without a unit, to first order, squared: (sum of weight times gradient) ** 2.

    Molchanov et al., Importance Estimation for Neural Network Pruning, CVPR 2019, equation 8, over all slices of a unit.
    """

    def __init__(
        self, model: nn.Module, batches: Sequence[object], loss: Callable[[nn.Module, object], Tensor]
    ) -> None:
        names = [name for name, p in model.named_parameters() if p.requires_grad]
        parameters = dict(model.named_parameters())
        self._products: list[dict[str, Tensor]] = []
        for batch in batches:
            with torch.enable_grad():
                grads = torch.autograd.grad(loss(model, batch), [parameters[n] for n in names], allow_unused=True)
            pairs = zip(names, grads, strict=True)
            self._products.append({n: (parameters[n].detach() * g).double() for n, g in pairs if g is not None})

    def __call__(self, model: nn.Module, group: UnitGroup) -> list[float]:
        total = torch.zeros(group.num_units, dtype=torch.float64)
        for products in self._products:
            for (name, dim), units in group.places.items():
                if name in products:
                    total += _per_unit(products[name], dim, units) ** 2
        return [float(value) for value in total]


def _per_unit(values: Tensor, dim: int, units: Sequence[Sequence[int]]) -> Tensor:
    """Sums over the slices of each unit."""
    rest = [d for d in range(values.dim()) if d != dim]
    along = (values.sum(rest) if rest else values).cpu()
    return torch.stack([along[list(unit)].sum() for unit in units])


def fractions_of(groups: Sequence[UnitGroup], fraction: float | Mapping[str, float]) -> dict[str, float]:
    """What share of each group goes, by its name; what no pattern matches stays whole.

    A pattern that is the name of groups means these, another one all groups that touch a module or tensor of that name.
    Where several match, the last one counts.
    """
    if not isinstance(fraction, Mapping):
        return {group.name: float(fraction) for group in groups}
    found = {group.name: 0.0 for group in groups}
    for pattern, value in fraction.items():
        named = [group for group in groups if fnmatchcase(group.name, pattern)]
        for group in named or [group for group in groups if group.matches(pattern)]:
            found[group.name] = float(value)
    return found
