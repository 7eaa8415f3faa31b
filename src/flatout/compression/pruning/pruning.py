"""Structured pruning: a smaller dense model of the same class, proved equal to the original without the removed units."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from flatout.compression.pruning.cutting import apply_pruning, named_tensors, shapes_after, sliced
from flatout.compression.pruning.graph import exported
from flatout.compression.pruning.products import WINDOW
from flatout.compression.pruning.proof import Prover, plan_for, refuse_unequal
from flatout.compression.pruning.search import Cut, Found, cuts_of, equal_widths, search
from flatout.compression.pruning.tying import Tied, tie
from flatout.compression.pruning.units import Group, Importance, Taylor, fractions_of, groups_of, magnitude, num_kept
from flatout.errors import PlanError, RecordError, UsageError
from flatout.records.pruning import PinnedUnits, PrunedGroup, PruningPlan, PruningReport
from flatout.records.record import from_json, to_json, write_file

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
        return self.plan.kept

    def map_state(self, *states: Tensor) -> tuple[Tensor, ...]:
        """States of the original as states of the smaller model.

        Raises UsageError for another number of states.
        """
        return map_state(self.plan, states)

    def save(self, path: str | Path) -> None:
        """Write the plan to a JSON file."""
        write_file(Path(path), to_json(self.plan))


def map_state(plan: PruningPlan, states: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The units of carried states that stay."""
    if len(states) != len(plan.states):
        raise UsageError(
            f"{len(states)} states were given, the model carries {len(plan.states)}; give them in its order"
        )
    return tuple(sliced(state, own) for state, own in zip(states, plan.states, strict=True))


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
    _check(inputs, num_state=num_state, round_to=round_to, importance=importance, batches=batches, loss=loss)
    graph = exported(model, inputs)
    tied = tie(model, graph, num_state=num_state)
    refuse_unequal(model, graph, inputs, tied)
    score = _importance(importance, model, batches, loss, seed)
    found, groups = _found(
        model, inputs, tied, score, fraction=fraction, keep=keep, num_state=num_state, round_to=round_to, seed=seed
    )
    if not found.cuts:
        reasons = "; ".join(f"{name}: {why}" for name, why in found.refused.items())
        raise PlanError(
            f"nothing of {type(model).__name__} can go{': ' if reasons else ''}{reasons or ', no unit is free'}; "
            "see docs/how-to/prune-a-model.md for what pins units"
        )
    plan = found.trial.plan
    smaller = apply_pruning(model, plan)
    shapes = [tuple(x.shape) for x in map_state(plan, inputs[len(inputs) - num_state :])] if num_state else []
    report = _report(model, smaller, inputs, tied, groups, found)
    return Pruned(smaller, plan, report, tuple(shapes))


def _check(
    inputs: Sequence[Tensor],
    *,
    num_state: int,
    round_to: int,
    importance: object,
    batches: Sequence[object],
    loss: object,
) -> None:
    if not all(isinstance(x, Tensor) for x in inputs):
        raise UsageError(
            f"inputs hold {[type(x).__name__ for x in inputs]}; give the tensors of one call, in their order"
        )
    if not 0 <= num_state <= len(inputs):
        raise UsageError(f"num_state {num_state} does not fit {len(inputs)} inputs; states are the last of the inputs")
    if round_to < 1:
        raise UsageError(f"round_to {round_to} is not positive; 1 leaves sizes as they come")
    if importance == "taylor" and (not batches or loss is None):
        raise UsageError("importance 'taylor' needs batches and loss(model, batch); give both, or take 'magnitude'")
    if isinstance(importance, str) and importance not in ("magnitude", "taylor", "random"):
        raise UsageError(f"importance '{importance}' is not known; take 'magnitude', 'taylor', 'random' or a function")


def _importance(
    importance: str | Importance, model: nn.Module, batches: Sequence[object], loss: Loss | None, seed: int
) -> Importance:
    if not isinstance(importance, str):
        return importance
    if importance == "taylor":
        assert loss is not None
        return Taylor(model, batches, loss)
    if importance == "random":
        generator = torch.Generator().manual_seed(seed)
        return lambda _, group: torch.rand(group.num_units, generator=generator).tolist()
    return magnitude


def _found(
    model: nn.Module,
    inputs: Sequence[Tensor],
    tied: Tied,
    score: Importance,
    *,
    fraction: float | Mapping[str, float],
    keep: Sequence[str],
    num_state: int,
    round_to: int,
    seed: int,
) -> tuple[Found, list[Group]]:
    groups = groups_of(tied, [name for name, _ in model.named_parameters(remove_duplicate=False)])
    for pattern in (*keep, *(fraction if isinstance(fraction, Mapping) else ())):
        if not any(group.matches(pattern) for group in groups):
            raise UsageError(
                f"'{pattern}' names no group; there are {', '.join(sorted(g.name for g in groups)) or 'none'}"
            )
    shares = fractions_of(groups, fraction)
    scores = {group.name: _scores(score, model, group) for group in groups}
    kept = {g.name: g.num_units if any(map(g.matches, keep)) else num_kept(g, shares[g.name], round_to) for g in groups}
    first, second = _one_of_partners(groups, kept)
    prover = Prover(model, inputs, num_state, tied, seed)
    found = _searched(prover, model, first, kept, scores)
    if spare := [g for g in second if any(h.name in found.refused and g.partners & set(h.variables) for h in first)]:
        again = _searched(prover, model, [*(g for g in first if g.name not in found.refused), *spare], kept, scores)
        again.refused |= found.refused
        found = again
    return found, groups


def _searched(
    prover: Prover, model: nn.Module, groups: list[Group], kept: dict[str, int], scores: dict[str, list[float]]
) -> Found:
    own = dict(kept)
    bundles = equal_widths(model, groups, own)
    cuts = cuts_of(groups, own, scores, bundles)
    return search(prover, cuts) if cuts else Found(prover.trial(frozenset()), [])


def _scores(score: Importance, model: nn.Module, group: Group) -> list[float]:
    found = [float(value) for value in score(model, group)]
    if len(found) != group.num_units or any(value != value for value in found):
        raise UsageError(
            f"importance gave {len(found)} numbers, or NaN, for '{group.name}' of {group.num_units} units; give one each"
        )
    return found


def _one_of_partners(groups: list[Group], kept: dict[str, int]) -> tuple[list[Group], list[Group]]:
    """Of heads and their size one is cut, the first: both would cut the product twice. The others come second."""
    first: list[Group] = []
    taken: set[int] = set()
    second = []
    for group in groups:
        if kept[group.name] < group.num_units and taken & set(group.variables):
            second.append(group)
            continue
        first.append(group)
        if kept[group.name] < group.num_units:
            taken |= group.partners
    return first, second


def _report(
    model: nn.Module, smaller: nn.Module, inputs: Sequence[Tensor], tied: Tied, groups: list[Group], found: Found
) -> PruningReport:
    before, after = amounts_of(model), amounts_of(smaller)
    states = found.trial.plan.states
    narrowed = (
        *inputs[: len(inputs) - len(states)],
        *(map_state(found.trial.plan, inputs[len(inputs) - len(states) :])),
    )
    return PruningReport(
        num_parameters_before=before[0],
        num_parameters=after[0],
        num_bytes_before=before[1],
        num_bytes=after[1],
        work_flop_before=work_flop(model, inputs),
        work_flop=work_flop(smaller, narrowed),
        groups=tuple(_told(model, tied, cut, group) for cut in found.cuts for group in cut.groups),
        pinned=(*_refused(groups, found), *_pinned(model, tied)),
        error=found.trial.error,
    )


def amounts_of(model: nn.Module) -> tuple[int, int]:
    tensors = {id(t): t for t in named_tensors(model).values()}.values()
    parameters = sum(p.numel() for p in model.parameters())
    return parameters, sum(t.numel() * t.element_size() for t in tensors)


def work_flop(model: nn.Module, inputs: Sequence[Tensor]) -> int:
    """Floating-point operations of the products of one call, as torch counts them: recurrent kernels of a CPU are not counted."""
    modes = {name: module.training for name, module in model.named_modules()}
    counter = FlopCounterMode(display=False)
    try:
        model.eval()
        with torch.no_grad(), counter:
            model(*(x.clone() for x in inputs))
    finally:
        for name, module in model.named_modules():
            module.training = modes[name]
    return int(counter.get_total_flops())


def _told(model: nn.Module, tied: Tied, cut: Cut, group: Group) -> PrunedGroup:
    removed = cut.removed & set(group.variables)
    tensors = named_tensors(model)
    after = shapes_after(plan_for(model, tied, removed, {}), tensors)
    num_parameters = num_bytes = 0
    seen: set[int] = set()
    for name, tensor in tensors.items():
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        gone = tensor.numel() - torch.Size(after[name]).numel()
        num_bytes += gone * tensor.element_size()
        num_parameters += gone if isinstance(tensor, nn.Parameter) else 0
    return PrunedGroup(
        name=group.name,
        places=group.told(),
        num_units=group.num_units,
        num_kept=group.num_units - len(removed),
        num_parameters=num_parameters,
        num_bytes=num_bytes,
    )


def _refused(groups: list[Group], found: Found) -> tuple[PinnedUnits, ...]:
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
