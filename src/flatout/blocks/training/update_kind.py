"""What updates must share to be replayed by one graph, compared at each replay."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from flatout.blocks.training.captured_calls import SCALARS


class UpdateKind(NamedTuple):
    """What calls share that are replayed by one graph: `CapturedUpdate._kind` of plain arguments, compared without hashing."""

    arguments: tuple[tuple[Any, ...], ...]
    """Shape, type and device of a tensor, or type and value."""
    optimizers: Sequence[Optimizer]
    groups: list[KnownGroup]
    modules: list[tuple[nn.Module, bool]]
    autocast: torch.dtype | None

    @staticmethod
    def from_call(
        args: tuple[Any, ...], kwargs: dict[str, Any], optimizers: Sequence[Optimizer], modules: Sequence[nn.Module]
    ) -> UpdateKind | None:
        """The kind of a call; None where an argument is a nest, or an array."""
        if kwargs or not all(isinstance(one, (Tensor, *SCALARS)) for one in args):
            return None
        return UpdateKind(
            tuple((a.shape, a.dtype, a.device) if isinstance(a, Tensor) else (type(a), a) for a in args),
            optimizers,
            [KnownGroup.from_group(group) for one in optimizers for group in one.param_groups],
            [(module, module.training) for module in modules],
            autocast_type(),
        )

    def fits(self, args: tuple[Any, ...]) -> bool:
        """Whether a call without keywords is of this kind."""
        if len(args) != len(self.arguments) or not torch.is_grad_enabled() or autocast_type() != self.autocast:
            return False
        for one, known in zip(args, self.arguments, strict=True):
            if isinstance(one, Tensor):
                if one.requires_grad or len(known) < 3:
                    return False
                if one.shape != known[0] or one.dtype is not known[1] or one.device != known[2]:
                    return False
            elif len(known) != 2 or type(one) is not known[0] or one != known[1]:
                return False
        groups = [group for one in self.optimizers for group in one.param_groups]
        return (
            len(groups) == len(self.groups)
            and all(known.is_still(group) for known, group in zip(self.groups, groups, strict=True))
            and all(module.training is mode for module, mode in self.modules)
        )


class KnownGroup(NamedTuple):
    """A group of an optimizer's parameters as it was when a graph was made."""

    group: dict[str, Any]
    settings: list[tuple[str, Any]]
    parameters: list[tuple[int, bool]]
    """Where each lies, and whether it has gradients."""

    @staticmethod
    def from_group(group: dict[str, Any]) -> KnownGroup:
        """A group as it is now."""
        settings = [(name, value) for name, value in group.items() if is_of_kind(name, group)]
        return KnownGroup(group, settings, [(p.data_ptr(), p.requires_grad) for p in group["params"]])

    def is_still(self, group: dict[str, Any]) -> bool:
        """Whether a group is this one, with the same settings and parameters."""
        if group is not self.group or len(group["params"]) != len(self.parameters):
            return False
        for name, value in self.settings:
            now = group.get(name, group)
            if now is not value and (type(now) is not type(value) or isinstance(now, Tensor) or now != value):
                return False
        return sum(is_of_kind(name, group) for name in group) == len(self.settings) and all(
            p.data_ptr() == pointer and p.requires_grad is required
            for p, (pointer, required) in zip(group["params"], self.parameters, strict=True)
        )


def is_of_kind(name: str, group: dict[str, Any]) -> bool:
    """Whether a setting of a group tells kinds of calls apart."""
    return name != "params" and (name != "lr" or not takes_rates(group))


def autocast_type() -> torch.dtype | None:
    return torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None


def takes_rates(group: dict[str, Any]) -> bool:
    """Whether the optimizer of a group reads its learning rate from a tensor (torch 2.11: fused ones, and Adam and its kin).

    One that the script keeps in a tensor already is read there.
    """
    is_of_adam = "capturable" in group and "betas" in group and "amsgrad" in group
    return not isinstance(group["lr"], Tensor) and bool(group.get("fused") or is_of_adam)
