"""Layers that get a low-rank pair: those that are named, or those that a stated rule selects.

The rule: every weight of a linear, convolutional, recurrent or attention layer whose pair has at most half of its numbers.
All layers and not attention alone: that learns more for the same number of parameters (Biderman et al., arXiv 2405.09673).
With a budget and no rank, the largest power of two up to 64 is taken whose pairs fit and whose targets still hold half of all
the numbers. Where even the given rank, or rank 1, does not fit, the largest weights come first and those that no longer fit are
left out, with that as the reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from math import inf, prod
from typing import Any, Final, NamedTuple, cast

from torch import Tensor, nn
from torch.nn.utils import parametrize

from flatout.core.errors import UsageError
from flatout.core.records.adapt import Lora
from flatout.shrink.adapt.low_rank import ADAPTED, BESIDE, PLAIN

_RANKS: Final = (64, 32, 16, 8, 4, 2, 1)


class Target(NamedTuple):
    """A weight: the path of its layer, and its name there."""

    path: str
    name: str
    shape: tuple[int, ...]

    @property
    def num_numbers(self) -> int:
        return prod(self.shape)

    def num_trained(self, rank: int, *, is_dora: bool = False) -> int:
        rows, columns = self.shape[0], prod(self.shape[1:])
        return rank * (rows + columns) + (rows if is_dora else 0)

    def is_worth_it(self, rank: int) -> bool:
        """Has the pair at most half of the weight's numbers?"""
        return 2 * self.num_trained(rank) <= self.num_numbers

    def __str__(self) -> str:
        return f"{self.name} {' x '.join(map(str, self.shape))}"


class TargetSelection(NamedTuple):
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


def select_targets(model: nn.Module, method: Lora) -> TargetSelection:
    """The targets and the rank of a method for this model.

    Raises UsageError for a named layer that cannot be adapted, with the reason, and where nothing is left.
    """
    _check(method)
    reasons = {path: refusal_reason(model, path, is_dora=method.is_dora) for path, _ in _layers(model)}
    if method.targets is not None:
        _check_named(model, method.targets, reasons, method.dropout)
    patterns = ("*",) if method.targets is None else method.targets
    why = {path: reason for path, reason in reasons.items() if reason}
    found = [t for t in _weights(model) if not reasons.get(t.path) and _is_named(model, t.path, patterns)]
    rank = method.rank or _rank_within(found, cast(int, method.budget), is_dora=method.is_dora)
    if method.targets is None:
        if method.dropout:
            raise UsageError("dropout needs targets that are named; it does not go with layers that form their weight")
        half = f"a pair of rank {rank} has more than half of the numbers of"
        why |= {t.path: f"{half} {t.name} ({' x '.join(map(str, t.shape))})" for t in found if not t.is_worth_it(rank)}
        found = [t for t in found if t.is_worth_it(rank)]
    fitting = _within(found, rank, method, why)
    if not fitting:
        reasons_text = "; ".join(f"{path}: {reason}" for path, reason in list(why.items())[:8])
        raise UsageError(
            f"rank {rank} leaves no layer to adapt; lower the rank or raise the budget "
            f"({reasons_text or 'it has none that can be'})"
        )
    return TargetSelection(rank, tuple(fitting), why)


def refusal_reason(model: nn.Module, path: str, *, is_dora: bool = False) -> str:
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


def _layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Those of the classes that can be adapted, their subclasses included."""
    kinds: Any = tuple(ADAPTED)
    return [(path, module) for path, module in model.named_modules() if isinstance(module, kinds)]


def _own_weights(module: nn.Module) -> list[tuple[str, Tensor]]:
    named = module._parameters.items()
    return [(name, p) for name, p in named if p is not None and "weight" in name and p.dim() >= 2]


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
    """Whether a pattern names the layer; the output projection inside nn.MultiheadAttention also by the attention's path."""
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
        is_only_around = path not in reasons and any(_is_named(model, other, patterns) for other in reasons)
        if not is_only_around and (reason := reasons.get(path, refusal_reason(model, path))):
            raise UsageError(f"'{path}' cannot be adapted: {reason}; name other modules")
        if dropout and path in reasons and not _takes_dropout(model, path):
            raise UsageError(f"'{path}' forms its weight and has no input of A to drop from; use dropout=0")


def _takes_dropout(model: nn.Module, path: str) -> bool:
    module = model.get_submodule(path)
    owner = model.get_submodule(path.rpartition(".")[0])
    return isinstance(module, BESIDE) and not isinstance(owner, nn.MultiheadAttention)


def _rank_within(targets: Sequence[Target], budget: int, *, is_dora: bool) -> int:
    whole = sum(t.num_numbers for t in targets)
    for rank in _RANKS:
        worth = [t for t in targets if t.is_worth_it(rank)]
        is_most = 2 * sum(t.num_numbers for t in worth) >= whole
        if is_most and sum(t.num_trained(rank, is_dora=is_dora) for t in worth) <= budget:
            return rank
    return 1


def _within(targets: Sequence[Target], rank: int, method: Lora, why: dict[str, str]) -> list[Target]:
    """Those that fit the budget, the largest first; in the model's order."""
    fitting, left = set(), inf if method.budget is None else method.budget
    for target in sorted(targets, key=lambda t: -t.num_numbers):
        num = target.num_trained(rank, is_dora=method.is_dora)
        if num <= left:
            fitting.add(target)
            left -= num
            why.setdefault(target.path, f"{target}, rank {rank}")
        else:
            why[target.path] = f"{num} numbers of its pair do not fit into the budget"
    return [t for t in targets if t in fitting]
