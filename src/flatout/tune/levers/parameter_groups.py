"""The parameters that an optimizer is constructed with, made so that they can be walked over more than once."""

from __future__ import annotations

from typing import Any


def listed_groups(arguments: dict[str, Any]) -> list[Any]:
    """The groups, or single parameters, among a constructor's arguments, where generators have become lists.

    The user's dicts stay what they are: they become the optimizer's own groups.
    """
    import torch

    groups: list[Any] = list(arguments["params"])
    for group in groups:
        if isinstance(group, dict) and not isinstance(group["params"], torch.Tensor):
            group["params"] = list(group["params"])
    arguments["params"] = groups
    return groups


def optimized_tensors(groups: list[Any]) -> list[Any]:
    """The parameters of all groups, in order."""
    found: list[Any] = []
    for group in groups:
        inside = group["params"] if isinstance(group, dict) else [group]
        found.extend(inside if isinstance(inside, list) else [inside])
    return found
