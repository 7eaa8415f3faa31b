"""Groups that can go together: all at once if they can; else one by one, and the rest is pinned with its reason."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn

from flatout.core.errors import UsageError
from flatout.shrink.prune.proof import PruningProver, PruningTrial
from flatout.shrink.prune.units import UnitGroup, removed_units


@dataclass(frozen=True, eq=False)
class GroupCut:
    """Groups that go together, because a module needs equal sizes of them, and what goes."""

    groups: tuple[UnitGroup, ...]
    num_remaining: Mapping[str, int]
    removed: frozenset[int]

    @property
    def name(self) -> str:
        return ", ".join(group.name for group in self.groups)


@dataclass
class CutSearch:
    trial: PruningTrial
    cuts: list[GroupCut]
    refused: dict[str, str] = field(default_factory=dict)
    """By the name of the group."""


def cuts_of(
    groups: Sequence[UnitGroup], keep: Mapping[str, int], scores: Mapping[str, Sequence[float]], bundles: list[set[str]]
) -> list[GroupCut]:
    """What each bundle of groups loses; a group that keeps all its units is left out."""
    by_name = {group.name: group for group in groups}
    left, cuts = dict(by_name), []
    for bundle in [*bundles, *({name} for name in by_name)]:
        own = tuple(left.pop(name) for name in by_name if name in bundle and name in left)
        removed = {group.variables[i] for group in own for i in removed_units(scores[group.name], keep[group.name])}
        if removed:
            cuts.append(GroupCut(own, {group.name: keep[group.name] for group in own}, frozenset(removed)))
    return cuts


def largest_valid_cuts(prover: PruningProver, cuts: list[GroupCut]) -> CutSearch:
    """The largest set of cuts that was found to hold. Each that is refused has its reason."""
    whole = prover.trial(_all(cuts))
    if not whole.because:
        return CutSearch(whole, list(cuts))
    alone = {cut: prover.trial(cut.removed).because for cut in cuts}
    good = [cut for cut in cuts if not alone[cut]]
    trial = prover.trial(_all(good))
    if not trial.because:
        found = CutSearch(trial, good)
    else:
        found = CutSearch(prover.trial(frozenset()), [])
        _grow(found, prover, dict.fromkeys(good, ""))
    _grow(found, prover, {cut: because for cut, because in alone.items() if because})
    return found


def _grow(found: CutSearch, prover: PruningProver, cuts: Mapping[GroupCut, str]) -> None:
    """Add each cut that holds beside those that are there: one that cannot go alone may hold once others are gone, too."""
    for cut, alone in cuts.items():
        trial = prover.trial(_all([*found.cuts, cut]))
        if trial.because:
            because = alone or f"alone it can go, not with the others: {trial.because}"
            found.refused |= {group.name: because for group in cut.groups}
        else:
            found.trial, found.cuts = trial, [*found.cuts, cut]


def _all(cuts: Sequence[GroupCut]) -> frozenset[int]:
    return frozenset().union(*(cut.removed for cut in cuts))


def equal_widths(model: nn.Module, groups: Sequence[UnitGroup], keep: dict[str, int]) -> list[set[str]]:
    """Groups that torch's attention needs equally wide: the model's width, and heads times a head's size.

    Lowers or raises `keep` of the width to what the heads leave. Raises UsageError where two layers ask for different widths.
    """
    bundles: list[set[str]] = []
    fixed: dict[str, int] = {}
    for path, module in model.named_modules():
        if not isinstance(module, nn.MultiheadAttention):
            continue
        prefix = f"{path}." if path else ""
        first = f"{prefix}in_proj_weight" if module.in_proj_weight is not None else f"{prefix}q_proj_weight"
        outer = [g for g in groups if (first, 1) in g.places]
        inner = [g for g in groups if (f"{prefix}out_proj.weight", 1) in g.places]
        if not outer and not inner:
            continue
        _match(path, module, outer, inner, keep, fixed)
        names = {group.name for group in (*outer, *inner)}
        for other in [b for b in bundles if b & names]:
            bundles.remove(other)
            names |= other
        bundles.append(names)
    return bundles


def _match(
    path: str,
    module: nn.MultiheadAttention,
    outer: list[UnitGroup],
    inner: list[UnitGroup],
    keep: dict[str, int],
    fixed: dict[str, int],
) -> None:
    width = module.embed_dim
    if len(outer) != 1 or len(inner) != 1 or outer[0].num_units != width or module.embed_dim % inner[0].num_units:
        for group in (*outer, *inner):
            keep[group.name] = group.num_units
        return
    own = keep[inner[0].name] * (width // inner[0].num_units)
    if fixed.setdefault(outer[0].name, own) != own:
        raise UsageError(
            f"'{path}' keeps a width of {own}, another attention on the same stream keeps {fixed[outer[0].name]}; "
            "torch's MultiheadAttention needs them equal: give all of them the same fraction"
        )
    keep[outer[0].name] = own
