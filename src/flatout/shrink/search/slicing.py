"""A smaller model that starts from a trained one's weights: the same parameters by name, cut along their dimensions.

Units are kept by importance, the same ones wherever a dimension is the same: what goes out of one layer and into the next, or
lies on one residual stream. Which dimensions are the same is known from
  1. `layout`, what the caller says: {"blocks.*.qkv.weight": ("3 4 head", "width")} by pattern of parameter names, a
     text a dimension: names of units and numbers that are not cut, outermost first; what `*` matched makes a name its own when
     the name ends in `*` ("head*");
  2. chains in `nn.Sequential`: what a linear layer or convolution gives is what the next one takes;
  3. torch's recurrent layers and nn.MultiheadAttention, whose weights are stacked gates and projections;
  4. else the size: all other dimensions of one size in the original model, and one in the candidate, are cut alike. That never
     contradicts itself, but knows nothing of heads packed in one dimension: say those by `layout`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from fnmatch import translate
from typing import Final, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from flatout.core.errors import UsageError

Layout: TypeAlias = Mapping[str, Sequence[str]]
Factors: TypeAlias = tuple[str | int, ...]
"""Of one dimension, outermost first: a name is a set of units that is cut, a number is kept whole."""
_LINKS: Final = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_PASSING: Final = (
    nn.modules.batchnorm._BatchNorm,
    nn.LayerNorm,
    nn.modules.dropout._DropoutNd,
    nn.ReLU,
    nn.GELU,
    nn.SiLU,
    nn.Tanh,
    nn.Sigmoid,
    nn.LeakyReLU,
    nn.ELU,
    nn.Hardswish,
    nn.Identity,
    nn.MaxPool1d,
    nn.MaxPool2d,
    nn.AvgPool1d,
    nn.AvgPool2d,
    nn.AdaptiveAvgPool1d,
    nn.AdaptiveAvgPool2d,
    nn.AdaptiveMaxPool2d,
    nn.Flatten,
)
"""Modules that keep channels in their order, or lay them out flat."""


class Inherited(NamedTuple):
    """What was taken over. `fraction` of the candidate's numbers; `fresh` are parameters that are as they were made."""

    fraction: float
    cut: tuple[str, ...]
    fresh: tuple[str, ...]


@torch.no_grad()
def inherit(candidate: nn.Module, original: nn.Module, *, layout: Layout | None = None) -> Inherited:
    """Put the original model's weights, cut to size, into the candidate's parameters and buffers of the same name.

    A parameter that the original model has not, or has smaller in some dimension or with other numbers of dimensions, is left as
    it was made. Importance of a unit: the sum of squares of all weights that it has a hand in, each tensor scaled to a sum of 1,
    so that large layers do not decide alone. A list of fewer blocks takes over the first ones.
    Raises UsageError where a layout does not fit the shapes.
    """
    theirs, own = _tensors(original), _tensors(candidate)
    shared = {name: (theirs[name], own[name]) for name in own if name in theirs}
    fitting = {name: pair for name, pair in shared.items() if _fits(*pair)}
    factors = _factors(original, {n: p for n, p in fitting.items() if p[0].dim()}, layout or {})
    remaining = _remaining_units(fitting, factors)
    cut = []
    for name, (source, target) in fitting.items():
        part = source
        for dim, names in enumerate(factors.get(name, ())):
            if source.shape[dim] != target.shape[dim]:
                part = part.index_select(dim, _rows(names, remaining, source.shape[dim]).to(part.device))
        target.copy_(part)
        if part is not source:
            cut.append(name)
    taken = sum(own[name].numel() for name in fitting)
    fresh = tuple(name for name in own if name not in fitting)
    return Inherited(taken / max(1, sum(t.numel() for t in own.values())), tuple(cut), fresh)


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _fits(source: Tensor, target: Tensor) -> bool:
    is_smaller = all(a >= b for a, b in zip(source.shape, target.shape, strict=False))
    return source.dim() == target.dim() and is_smaller and source.is_floating_point() == target.is_floating_point()


# -- which dimensions are the same -------------------------------------------------------------------------------------------


def _factors(
    original: nn.Module, fitting: Mapping[str, tuple[Tensor, Tensor]], layout: Layout
) -> dict[str, list[Factors]]:
    """Factors of every dimension of every tensor; by size where nothing better is known."""
    found: dict[str, list[Factors]] = {}
    known: dict[tuple[str, int], Factors] = {**_sequential_links(original), **_stacked(original)}
    patterns = [(re.compile(translate(pattern)), pattern, texts) for pattern, texts in layout.items()]
    for name, (source, target) in fitting.items():
        matched = next(((pattern, texts) for match, pattern, texts in patterns if match.match(name)), None)
        if matched is not None:
            found[name] = _spelled(name, *matched, source)
            continue
        pairs = zip(source.shape, target.shape, strict=True)
        found[name] = [known.get((name, dim), (f"size {a} to {b}",)) for dim, (a, b) in enumerate(pairs)]
    _resolve(found, fitting)
    return found


def _spelled(name: str, pattern: str, texts: Sequence[str], source: Tensor) -> list[Factors]:
    if len(texts) != source.dim():
        raise UsageError(f"layout '{pattern}' has {len(texts)} dimensions and '{name}' {source.dim()}; say them all")
    places = re.match(re.escape(pattern).replace(r"\*", "(.*)"), name)
    own = ".".join(places.groups()) if places is not None else ""
    return [
        tuple(int(t) if t.isdecimal() else f"{t[:-1]} of {own}" if t.endswith("*") else t for t in text.split())
        for text in texts
    ]


def _sequential_links(original: nn.Module) -> dict[tuple[str, int], Factors]:
    """Dimensions inside each nn.Sequential, between one layer with weights and the next."""
    found: dict[tuple[str, int], Factors] = {}
    for path, module in original.named_modules():
        if type(module) is not nn.Sequential:
            continue
        units, num_out = "", 0
        names: list[tuple[str, int]] = []
        for name, child in module.named_children():
            own = f"{path}.{name}" if path else name
            if isinstance(child, _LINKS) and getattr(child, "groups", 1) == 1:
                if units and child.weight.shape[1] % num_out == 0:
                    found.update(dict.fromkeys(names, (units,)))
                    each = child.weight.shape[1] // num_out
                    found[f"{own}.weight", 1] = (units, each) if each > 1 else (units,)
                units, num_out = f"out of {own}", child.weight.shape[0]
                names = [(f"{own}.weight", 0), (f"{own}.bias", 0)]
            elif isinstance(child, _PASSING):
                names += [(f"{own}.{of}", 0) for of in ("weight", "bias", "running_mean", "running_var")]
            else:
                units, names = "", []
    return found


def _stacked(original: nn.Module) -> dict[tuple[str, int], Factors]:
    """Torch's own layers with several matrices in one: gates of recurrences, projections of attention."""
    found: dict[tuple[str, int], Factors] = {}
    for path, module in original.named_modules():
        gates = {nn.GRUCell: 3, nn.LSTMCell: 4, nn.GRU: 3, nn.LSTM: 4}.get(type(module))
        if gates is not None:
            hidden = f"hidden of {path}"
            for name, _ in module.named_parameters():
                own = f"{path}.{name}" if path else name
                found[own, 0] = (gates, hidden)
                if name.startswith("weight_hh") or (name.startswith("weight_ih_l") and name != "weight_ih_l0"):
                    found[own, 1] = (hidden,)
        if isinstance(module, nn.MultiheadAttention) and module.in_proj_weight is not None:
            rows: Factors = (3, module.num_heads, f"head of {path}")
            found[f"{path}.in_proj_weight", 0] = found[f"{path}.in_proj_bias", 0] = rows
            found[f"{path}.out_proj.weight", 1] = rows[1:]
    return found


def _resolve(found: dict[str, list[Factors]], fitting: Mapping[str, tuple[Tensor, Tensor]]) -> None:
    """Sets with a name, and dimensions that are known by their size alone, are one set where the sizes are the same.

    So a cell's state is what other layers take, and a name in a layout need be said for the packed dimensions alone. Two names of
    a layout with one size are two sets; which of them a dimension belongs to is then only what the layout says.
    """
    by_size: dict[tuple[int, int], set[str]] = {}
    for name, dims in found.items():
        for dim, names in enumerate(dims):
            units = [n for n in names if isinstance(n, str)]
            if len(units) == 1 and (units[0].startswith("hidden of ") or " " not in units[0]):
                fixed = math.prod(n for n in names if isinstance(n, int))
                size = fitting[name][0].shape[dim] // fixed, fitting[name][1].shape[dim] // fixed
                by_size.setdefault(size, set()).add(units[0])
    for (a, b), named in by_size.items():
        if sum(" " not in n for n in named) > 1:
            continue
        plain = f"size {a} to {b}"
        for dims in found.values():
            for dim, names in enumerate(dims):
                dims[dim] = tuple(plain if n in named else n for n in names)


# -- which units stay --------------------------------------------------------------------------------------------------------


def _remaining_units(
    fitting: Mapping[str, tuple[Tensor, Tensor]], factors: Mapping[str, Sequence[Factors]]
) -> dict[str, Tensor]:
    """Numbers of the units of each set that stay, rising."""
    sizes: dict[str, tuple[int, int]] = {}
    weights: dict[str, Tensor] = {}
    for name, (source, target) in fitting.items():
        for dim, names in enumerate(factors.get(name, ())):
            for unit, size in _sizes(name, names, source.shape[dim], target.shape[dim]).items():
                if sizes.setdefault(unit, size) != size:
                    raise UsageError(
                        f"'{unit}' has {size} units in '{name}' and {sizes[unit]} elsewhere; mend the layout"
                    )
                if (
                    size[0] != size[1]
                    and source.is_floating_point()
                    and name.rpartition(".")[2] not in ("running_mean", "running_var")
                ):
                    weights[unit] = weights.get(unit, torch.zeros(size[0])) + _importance(source, dim, names, unit)
    return {
        unit: weights.get(unit, torch.zeros(a)).topk(b).indices.sort().values
        for unit, (a, b) in sizes.items()
        if a != b
    }


def _sizes(name: str, names: Factors, original: int, wanted: int) -> dict[str, tuple[int, int]]:
    """Units of the set in a dimension: the original's number, and the candidate's.

    Raises UsageError when the factors do not make up the dimension.
    """
    units = [n for n in names if isinstance(n, str)]
    fixed = math.prod(n for n in names if isinstance(n, int))
    if not units and original == wanted == fixed:
        return {}
    if len(units) != 1 or original % fixed or wanted % fixed:
        raise UsageError(
            f"'{' '.join(map(str, names))}' does not make up a dimension of {original} and {wanted} in '{name}'; "
            "give one name and numbers that divide both"
        )
    return {units[0]: (original // fixed, wanted // fixed)}


def _importance(source: Tensor, dim: int, names: Factors, unit: str) -> Tensor:
    """Share of a tensor's sum of squares that each unit has."""
    squares = source.detach().float().square()
    other = [d for d in range(source.dim()) if d != dim]
    line = squares.sum(other) if other else squares
    shape, at = _shape(names, source.shape[dim]), names.index(unit)
    line = line.view(shape).sum([d for d in range(len(shape)) if d != at]) if len(shape) > 1 else line
    return (line / line.sum().clamp_min(1e-30)).cpu()


def _shape(names: Factors, size: int) -> list[int]:
    fixed = math.prod(n for n in names if isinstance(n, int))
    return [n if isinstance(n, int) else size // fixed for n in names]


def _rows(names: Factors, remaining: Mapping[str, Tensor], size: int) -> Tensor:
    """Places of a dimension that stay."""
    grid = torch.arange(size).view(_shape(names, size))
    for at, name in enumerate(names):
        if isinstance(name, str) and name in remaining:
            grid = grid.index_select(at, remaining[name])
    return grid.flatten()
