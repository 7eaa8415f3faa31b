"""Which layers get a low-rank pair: those named, or those chosen by a stated rule.

The rule: every weight of a linear, convolutional, recurrent or attention layer whose pair has at most half of its numbers.
All layers and not attention alone: that learns more for the same number of parameters (Biderman et al., arXiv 2405.09673).
With a budget and no rank, the largest power of two up to 64 is taken whose pairs fit and whose targets still hold half of all
the numbers. Where even the given rank, or rank 1, does not fit, the largest weights come first and those that no longer fit are
left out, with that as the reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Final, NamedTuple, cast

from torch import Tensor, nn
from torch.nn.utils import parametrize

from flatout.adapting.low_rank import ADAPTED, BESIDE, PLAIN
from flatout.errors import UsageError
from flatout.records.adapting import Lora

_RANKS: Final = (64, 32, 16, 8, 4, 2, 1)


class Target(NamedTuple):
    """A weight: the path of its layer, and its name there."""

    path: str
    name: str
    shape: tuple[int, ...]

    @property
    def num_numbers(self) -> int:
        return self.shape[0] * _columns(self.shape)

    def num_trained(self, rank: int, *, is_dora: bool) -> int:
        rows, columns = self.shape[0], _columns(self.shape)
        return rank * (rows + columns) + (rows if is_dora else 0)


class Choice(NamedTuple):
    rank: int
    targets: tuple[Target, ...]
    why: dict[str, str]
    """Why a layer is a target or not, by path."""


def matches(path: str, patterns: Sequence[str]) -> bool:
    """Is the path one of those: as a whole, by its last names, or by * ? [].

    >>> matches("blocks.0.qkv", ("qkv",)), matches("blocks.0.qkv", ("blocks.*",)), matches("blocks.0.qkv", ("kv",))
    (True, True, False)
    """
    return any(path == p or path.endswith(f".{p}") or fnmatchcase(path, p) for p in patterns)


def check_used(patterns: Sequence[str], paths: Sequence[str], *, of: str) -> None:
    """Raise UsageError for a pattern that fits none of the paths."""
    for pattern in patterns:
        if not any(matches(path, (pattern,)) for path in paths):
            raise UsageError(f"'{pattern}' names no {of}; there are {', '.join(paths[:12]) or 'none'}")


def choose(model: nn.Module, method: Lora) -> Choice:
    """The targets and the rank of a method for this model.

    Raises UsageError for a named layer that cannot be adapted, with the reason, and where nothing is left.
    """
    _check(method)
    reasons = {path: why_not(model, path, is_dora=method.is_dora) for path, _ in _layers(model)}
    if method.targets is not None:
        _check_named(model, method.targets, reasons, method.dropout)
    patterns = ("*",) if method.targets is None else method.targets
    why = {path: reason for path, reason in reasons.items() if reason}
    found = [t for t in _weights(model) if not reasons.get(t.path) and _is_named(model, t.path, patterns)]
    rank = method.rank or _rank_within(found, cast(int, method.budget), is_dora=method.is_dora)
    if method.targets is None:
        found = list(_chosen(found, rank, why, dropout=method.dropout))
    kept = _within(found, rank, method, why)
    if not kept:
        told = "; ".join(f"{path}: {reason}" for path, reason in list(why.items())[:8]) or "it has none that can be"
        raise UsageError(f"rank {rank} leaves no layer to adapt; lower the rank or raise the budget ({told})")
    return Choice(rank, tuple(kept), why)


def why_not(model: nn.Module, path: str, *, is_dora: bool = False) -> str:
    """Why this layer cannot be adapted; empty where it can."""
    module = model.get_submodule(path)
    kind = PLAIN.get(type(module), type(module))
    if parametrize.is_parametrized(module):
        return f"its {next(iter(cast(nn.ModuleDict, module.parametrizations)))} is parametrized; remove that first"
    if kind not in ADAPTED:
        of = next((k.__name__ for k in ADAPTED if isinstance(module, k)), None)
        return f"{kind.__name__} is a class of its own beneath nn.{of}" if of else f"{kind.__name__} has no such weight"
    weights = [name for name, _ in _own_weights(module)]
    if not weights:
        return "its weight is no parameter (weight_norm or pruning stands before it); remove that first"
    if any(not weight.is_floating_point() for _, weight in _own_weights(module)):
        return "its weight does not hold floating-point numbers"
    if getattr(module, "groups", 1) != 1:
        return f"it has {module.groups} groups, each with a small matrix of its own"
    if is_dora and isinstance(module, (nn.ConvTranspose1d, nn.ConvTranspose2d)):
        return "DoRA gives lengths to rows, and a transposed convolution's rows are inputs"
    if isinstance(module, nn.LSTM) and module.proj_size:
        return "its outputs are projected"
    return ""


def _layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Those of the classes that can be adapted, their subclasses included."""
    kinds = tuple(ADAPTED)
    for path, module in model.named_modules():
        found: nn.Module = module
        if isinstance(found, kinds):
            yield path, module


def _own_weights(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in module._parameters.items():
        if parameter is not None and "weight" in name and parameter.dim() >= 2:
            yield name, parameter


def _weights(model: nn.Module) -> Iterator[Target]:
    for path, module in _layers(model):
        for name, weight in _own_weights(module):
            yield Target(path, name, tuple(weight.shape))


def _check(method: Lora) -> None:
    if method.rank is None and method.budget is None:
        raise UsageError("rank None without a budget; give one of them")
    if method.rank is not None and method.rank < 1:
        raise UsageError(f"rank {method.rank} is below 1; the pair needs a vector")
    if method.alpha is not None and not method.alpha > 0:
        raise UsageError(f"alpha {method.alpha} is not above 0; the product is multiplied by alpha / rank")
    if not 0 <= method.dropout < 1:
        raise UsageError(f"dropout {method.dropout} is outside 0..1")


def _is_named(model: nn.Module, path: str, patterns: Sequence[str]) -> bool:
    """By its own path; the output projection inside nn.MultiheadAttention also by the attention's."""
    if matches(path, patterns):
        return True
    owner = path.rpartition(".")[0]
    return isinstance(model.get_submodule(owner), nn.MultiheadAttention) and matches(owner, patterns)


def _check_named(model: nn.Module, patterns: Sequence[str], reasons: Mapping[str, str], dropout: float) -> None:
    paths = [path for path, _ in model.named_modules()]
    check_used(patterns, paths, of="module")
    for path in paths:
        if not any(p == path or path.endswith(f".{p}") for p in patterns):
            continue  # a pattern with * passes over what cannot be adapted
        if path not in reasons and not any(_is_named(model, other, patterns) for other in reasons if other != path):
            raise UsageError(f"'{path}' cannot be adapted: {why_not(model, path)}; name other modules")
        if reasons.get(path):
            raise UsageError(f"'{path}' cannot be adapted: {reasons[path]}; name other modules")
        if dropout and path in reasons and not _takes_dropout(model, path):
            raise UsageError(f"'{path}' forms its weight and has no input of A to drop from; use dropout=0")


def _takes_dropout(model: nn.Module, path: str) -> bool:
    module = model.get_submodule(path)
    owner = model.get_submodule(path.rpartition(".")[0])
    return isinstance(module, BESIDE) and not isinstance(owner, nn.MultiheadAttention)


def _columns(shape: Sequence[int]) -> int:
    columns = 1
    for length in shape[1:]:
        columns *= length
    return columns


def _rank_within(targets: Sequence[Target], budget: int, *, is_dora: bool) -> int:
    whole = sum(t.num_numbers for t in targets)
    for rank in _RANKS:
        worth = [t for t in targets if _is_worth_it(t, rank)]
        is_most = 2 * sum(t.num_numbers for t in worth) >= whole
        if is_most and sum(t.num_trained(rank, is_dora=is_dora) for t in worth) <= budget:
            return rank
    return 1


def _is_worth_it(target: Target, rank: int) -> bool:
    rows, columns = target.shape[0], _columns(target.shape)
    return 2 * rank * (rows + columns) <= rows * columns


def _chosen(targets: Sequence[Target], rank: int, why: dict[str, str], *, dropout: float) -> Iterator[Target]:
    for target in targets:
        if _is_worth_it(target, rank):
            yield target
        else:
            shape = " x ".join(map(str, target.shape))
            why[target.path] = f"a pair of rank {rank} has more than half of the numbers of {target.name} ({shape})"
    if dropout:
        raise UsageError("dropout needs targets that are named; it does not go with layers that form their weight")


def _within(targets: Sequence[Target], rank: int, method: Lora, why: dict[str, str]) -> list[Target]:
    """Those that fit the budget, the largest first; in the model's order."""
    kept, left = set(), method.budget
    for target in sorted(targets, key=lambda t: -t.num_numbers):
        num = target.num_trained(rank, is_dora=method.is_dora)
        if left is None or num <= left:
            kept.add(target)
            left = None if left is None else left - num
            why.setdefault(target.path, f"{target.name} {' x '.join(map(str, target.shape))}, rank {rank}")
        else:
            why[target.path] = f"{num} numbers of its pair do not fit into the budget"
    return [t for t in targets if t in kept]
