"""Structured pruning: a smaller dense model of the same class, proved equal to the original without the removed units."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Generic, Literal, TypeVar

import msgspec
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from flatout.core.errors import PlanError, RecordError, UsageError
from flatout.core.files import write_whole_file
from flatout.core.records.prune import PinnedUnits, PrunedGroup, PruningPlan, PruningReport
from flatout.core.records.record import from_json, to_json
from flatout.shrink.module_mode import in_mode
from flatout.shrink.prune.graph import exported
from flatout.shrink.prune.products import WINDOW
from flatout.shrink.prune.proof import PruningProver, plan_for, refuse_unequal
from flatout.shrink.prune.search import CutSearch, GroupCut, cuts_of, equal_widths, largest_valid_cuts
from flatout.shrink.prune.surgery import apply_pruning, named_tensors, select_units
from flatout.shrink.prune.ties import Tied, tie
from flatout.shrink.prune.units import Importance, Taylor, UnitGroup, fractions_of, groups_of, magnitude, num_remaining

M = TypeVar("M", bound=nn.Module)
Loss = Callable[[nn.Module, object], Tensor]


@dataclass(frozen=True)
class Pruned(Generic[M]):
    """The smaller model, and what was done to get it. `plan` makes it again: `apply_pruning(original, plan)`."""

    model: M
    plan: PruningPlan
    report: PruningReport
    state_shapes: tuple[tuple[int, ...], ...]
    """Of the carried states, as the smaller model takes and gives them."""

    @property
    def indices(self) -> dict[str, tuple[tuple[int, ...] | None, ...]]:
        """What stays of each tensor that was cut, by dimension: an optimizer's state is cut in the same way."""
        return self.plan.remaining

    def map_state(self, *states: Tensor) -> tuple[Tensor, ...]:
        """States of the original as states of the smaller model.

        Raises UsageError for another number of states.
        """
        return map_state(self.plan, states)

    def save(self, path: str | Path) -> None:
        """Write the plan to a JSON file."""
        write_whole_file(Path(path), to_json(self.plan))


def map_state(plan: PruningPlan, states: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The units of carried states that stay."""
    if len(states) != len(plan.states):
        raise UsageError(
            f"{len(states)} states were given, the model carries {len(plan.states)}; give them in its order"
        )
    return tuple(select_units(state, own) for state, own in zip(states, plan.states, strict=True))


def read_pruning(path: str | Path) -> PruningPlan:
    """The plan in a file that `Pruned.save` wrote.

    Raises PlanError when there is none, or no such plan in it.
    """
    try:
        return from_json(Path(path).read_bytes(), PruningPlan)
    except (OSError, RecordError) as e:
        raise PlanError(f"'{path}' holds no plan of pruning: {e}; give the file that Pruned.save wrote") from e


def prune(
    model: M,
    inputs: Sequence[Tensor],
    *,
    fraction: float | Mapping[str, float] = 0.5,
    importance: Literal["magnitude", "taylor", "random"] | Importance = "magnitude",
    batches: Sequence[object] = (),
    loss: Loss | None = None,
    keep: Sequence[str] = (),
    num_state: int = 0,
    round_to: int = 1,
    seed: int = 0,
) -> Pruned[M]:
    """A smaller copy of `model`; the model itself stays as it is.

    Goes: `fraction` of the units of every group of units that can go, the least important ones. A group is what belongs together:
    the channels of a convolution with all that reads them, the heads of an attention, the hidden units of a recurrent layer with
    its state, the width of a residual stream. A mapping from patterns ("blocks.*.up") to fractions names groups by the modules
    or tensors they touch, and leaves the others whole. `keep` names groups that stay whole.

    `importance` "taylor" needs `batches` and `loss(model, batch)`; a function gets the model and the group and gives one number a
    unit. `num_state` of the inputs, the last ones, are carried state that comes back as the last outputs; its width may change.
    Sizes that stay are multiples of `round_to`, where there are as many units.

    Sizes of other inputs and of outputs never change. The result gives the outputs of the original with the removed units
    masked, in float64 to 1e-8, norms taken over the units that stay; that is proved on `inputs`, with the model's own
    weights and with others. What cannot go is in `report.pinned` with its reason.

    Raises PlanError when nothing can go or the model cannot be exported, and UsageError for arguments that do not fit.
    """
    if not all(isinstance(x, Tensor) for x in inputs):
        raise UsageError(
            f"inputs hold {[type(x).__name__ for x in inputs]}; give the tensors of one call, in their order"
        )
    if not 0 <= num_state <= len(inputs):
        raise UsageError(f"num_state {num_state} does not fit {len(inputs)} inputs; states are the last of the inputs")
    if round_to < 1:
        raise UsageError(f"round_to {round_to} is not positive; 1 leaves sizes as they come")
    score = _importance(importance, model, batches, loss, seed)
    graph = exported(model, inputs)
    tied = tie(model, graph, num_state=num_state)
    refuse_unequal(model, inputs, tied)
    groups = groups_of(tied, [name for name, _ in model.named_parameters(remove_duplicate=False)])
    for pattern in (*keep, *(fraction if isinstance(fraction, Mapping) else ())):
        if not any(group.matches(pattern) for group in groups):
            raise UsageError(
                f"'{pattern}' names no group; there are {', '.join(sorted(g.name for g in groups)) or 'none'}"
            )
    shares = fractions_of(groups, fraction)
    remaining = {
        g.name: g.num_units if any(map(g.matches, keep)) else num_remaining(g, shares[g.name], round_to) for g in groups
    }
    scores = {group.name: _scores(score, model, group) for group in groups}
    found = _found(PruningProver(model, inputs, num_state, tied, seed), groups, remaining, scores)
    if not found.cuts:
        reasons = "; ".join(f"{name}: {why}" for name, why in found.refused.items())
        raise PlanError(
            f"nothing of {type(model).__name__} can go{': ' if reasons else ''}{reasons or ', no unit is free'}; "
            "see docs/how-to/prune-a-model.md for what pins units"
        )
    plan = found.trial.plan
    smaller = apply_pruning(model, plan)
    split = len(inputs) - num_state
    states = map_state(plan, inputs[split:])
    report = msgspec.structs.replace(
        report_of(model, smaller, inputs, (*inputs[:split], *states), error=found.trial.error),
        groups=tuple(_group_record(model, tied, cut, group) for cut in found.cuts for group in cut.groups),
        pinned=(*_refused(groups, found), *_pinned(model, tied)),
    )
    return Pruned(smaller, plan, report, tuple(tuple(x.shape) for x in states))


def _importance(
    importance: str | Importance, model: nn.Module, batches: Sequence[object], loss: Loss | None, seed: int
) -> Importance:
    match importance:
        case "magnitude":
            return magnitude
        case "taylor":
            if not batches or loss is None:
                raise UsageError(
                    "importance 'taylor' needs batches and loss(model, batch); give both, or take 'magnitude'"
                )
            return Taylor(model, batches, loss)
        case "random":
            generator = torch.Generator().manual_seed(seed)
            return lambda _, group: torch.rand(group.num_units, generator=generator).tolist()
        case str():
            raise UsageError(
                f"importance '{importance}' is not known; take 'magnitude', 'taylor', 'random' or a function"
            )
    return importance


def _found(
    prover: PruningProver, groups: list[UnitGroup], remaining: dict[str, int], scores: dict[str, list[float]]
) -> CutSearch:
    """The largest cuts that hold; partners are cut where the groups that they are partners of cannot be."""
    first, second = _one_of_partners(groups, remaining)
    found = _searched(prover, first, remaining, scores)
    if spare := [g for g in second if any(h.name in found.refused and g.partners & set(h.variables) for h in first)]:
        left = [*(g for g in first if g.name not in found.refused), *spare]
        again = _searched(prover, left, remaining, scores)
        again.refused |= found.refused
        return again
    return found


def _searched(
    prover: PruningProver, groups: list[UnitGroup], remaining: dict[str, int], scores: dict[str, list[float]]
) -> CutSearch:
    own = dict(remaining)
    bundles = equal_widths(prover.model, groups, own)
    cuts = cuts_of(groups, own, scores, bundles)
    return largest_valid_cuts(prover, cuts) if cuts else CutSearch(prover.trial(frozenset()), [])


def _scores(score: Importance, model: nn.Module, group: UnitGroup) -> list[float]:
    found = [float(value) for value in score(model, group)]
    if len(found) != group.num_units or any(value != value for value in found):
        raise UsageError(
            f"importance gave {len(found)} numbers, or NaN, for '{group.name}' of {group.num_units} units; give one each"
        )
    return found


def _one_of_partners(groups: list[UnitGroup], remaining: dict[str, int]) -> tuple[list[UnitGroup], list[UnitGroup]]:
    """Groups to cut first, and their partners: of heads and their size only one is cut, both would cut the product twice."""
    first: list[UnitGroup] = []
    taken: set[int] = set()
    second = []
    for group in groups:
        if remaining[group.name] < group.num_units and taken & set(group.variables):
            second.append(group)
            continue
        first.append(group)
        if remaining[group.name] < group.num_units:
            taken |= group.partners
    return first, second


def report_of(
    model: nn.Module, smaller: nn.Module, inputs: Sequence[Tensor], narrowed: Sequence[Tensor], *, error: float
) -> PruningReport:
    """What both models hold and compute, the smaller one with inputs `narrowed`; nothing of what was cut."""
    (parameters_before, bytes_before), (parameters, num_bytes) = _amounts(model), _amounts(smaller)
    return PruningReport(
        num_parameters_before=parameters_before,
        num_parameters=parameters,
        num_bytes_before=bytes_before,
        num_bytes=num_bytes,
        work_flop_before=work_flop(model, inputs),
        work_flop=work_flop(smaller, narrowed),
        error=error,
    )


def _amounts(model: nn.Module) -> tuple[int, int]:
    tensors = {id(t): t for t in named_tensors(model).values()}.values()
    return sum(p.numel() for p in model.parameters()), sum(t.nbytes for t in tensors)


def work_flop(model: nn.Module, inputs: Sequence[Tensor]) -> int:
    """Floating-point operations of the products of one call, as torch counts them: recurrent kernels of a CPU are not counted."""
    counter = FlopCounterMode(display=False)
    with in_mode(model, is_training=False), torch.no_grad(), counter:
        model(*(x.clone() for x in inputs))
    return int(counter.get_total_flops())


def _group_record(model: nn.Module, tied: Tied, cut: GroupCut, group: UnitGroup) -> PrunedGroup:
    removed = cut.removed & set(group.variables)
    tensors = named_tensors(model)
    gone: dict[int, tuple[Tensor, int]] = {}
    for name, own in plan_for(model, tied, removed, {}).remaining.items():
        tensor = tensors[name]
        sizes = (size if left is None else len(left) for size, left in zip(tensor.shape, own, strict=True))
        gone[id(tensor)] = tensor, tensor.numel() - prod(sizes)
    return PrunedGroup(
        name=group.name,
        places=group.place_names(),
        num_units=group.num_units,
        num_remaining=group.num_units - len(removed),
        num_parameters=sum(num for tensor, num in gone.values() if isinstance(tensor, nn.Parameter)),
        num_bytes=sum(num * tensor.element_size() for tensor, num in gone.values()),
    )


def _refused(groups: list[UnitGroup], found: CutSearch) -> tuple[PinnedUnits, ...]:
    by_name = {group.name: group for group in groups}
    return tuple(
        PinnedUnits(place=name, size=by_name[name].num_units, because=why)
        for name, why in found.refused.items()
        if name not in {group.name for cut in found.cuts for group in cut.groups}
    )


def _pinned(model: nn.Module, tied: Tied) -> tuple[PinnedUnits, ...]:
    """Dimensions of parameters all of whose units stay, with what pinned the first of them."""
    found: list[PinnedUnits] = []
    for name, _ in model.named_parameters():
        for d, dim in enumerate(tied.named[name]):
            if len(dim) > 1 and not tied.terms.variables(dim):
                known = (tied.terms.because[v] for term in dim for v in term if v in tied.terms.because)
                because = next(known, "tied to a size that stays")
                if because == WINDOW:
                    continue
                found.append(PinnedUnits(place=f"{name}[{d}]", size=len(dim), because=because))
    return tuple(found)
