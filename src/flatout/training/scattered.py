"""Parts of a checkpoint of which ranks hold different names, as the stages of a pipeline do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from torch import Tensor


@runtime_checkable
class Scattered(Protocol):
    """A part whose `state_dict` has this rank's names alone; the checkpoint has those of all.

    `places` says how a loaded tensor of a name is to lie (names as in the state, joined by '/'); `own` cuts the state of all
    ranks down to what this rank holds, and raises UsageError when something of it is lacking; `writes` says whether this rank
    writes what it holds of a tensor, which others may hold, too; `weights` are the names of what must be finite.
    """

    def state_dict(self) -> dict[str, Any]:
        """This rank's."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """What `own` has left, with its tensors."""

    def places(self) -> Mapping[str, Tensor]:
        """See above."""

    def own(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """See above."""

    def writes(self, name: str, *, is_shard: bool) -> bool:
        """See above."""

    def weights(self) -> list[str]:
        """See above."""


def united(states: list[Any]) -> Any:
    """Nests of mappings with the keys of all; of what several have, the first.

    >>> united([{"a": {"b": 1}}, {"a": {"b": 2, "c": 3}}])
    {'a': {'b': 1, 'c': 3}}
    """
    first = states[0]
    if not isinstance(first, Mapping):
        return first
    found: dict[str, Any] = {}
    for state in (one for one in states if isinstance(one, Mapping)):
        for key, value in state.items():
            found[key] = united([found[key], value]) if key in found else value
    return found
