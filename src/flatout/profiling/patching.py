"""Replacing attributes for the time of an observation, and putting every one back."""

from __future__ import annotations

from typing import Final

_ABSENT: Final = object()


class Patches:
    """Attributes replaced, in order. `undo` restores each, also those that were inherited and not there themselves."""

    def __init__(self) -> None:
        self._done: list[tuple[object, str, object]] = []

    def set(self, owner: object, name: str, value: object) -> None:
        """Replace `owner.name` by `value`."""
        self._done.append((owner, name, vars(owner).get(name, _ABSENT)))
        setattr(owner, name, value)

    def undo(self) -> None:
        """Restore all, last first. Calling it again does nothing."""
        while self._done:
            owner, name, before = self._done.pop()
            if before is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, before)
