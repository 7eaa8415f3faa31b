"""Replacing attributes for the time of an observation, and putting every one back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import ClassVar, Final

_ABSENT: Final = object()


class Patches:
    """Attributes replaced, in order. `undo` restores each, also those that were inherited and not there themselves."""

    _live: ClassVar[list[Patches]] = []
    """Those with something replaced now, in the order in which they began."""

    def __init__(self) -> None:
        self._done: list[tuple[object, str, object]] = []

    def set(self, owner: object, name: str, value: object) -> None:
        """Replace `owner.name` by `value`."""
        if not self._done:
            self._live.append(self)
        self._done.append((owner, name, vars(owner).get(name, _ABSENT)))
        setattr(owner, name, value)

    def undo(self) -> None:
        """Restore all, last first. Calling it again does nothing."""
        if self._done:
            self._live.remove(self)
        while self._done:
            owner, name, before = self._done.pop()
            _restore(owner, name, before)

    @contextmanager
    def _suspended(self) -> Iterator[None]:
        now = [(owner, name, before, vars(owner).get(name, _ABSENT)) for owner, name, before in self._done]
        for owner, name, before, _ in reversed(now):
            _restore(owner, name, before)
        try:
            yield
        finally:
            for owner, name, _, value in now:
                _restore(owner, name, value)


@contextmanager
def all_suspended() -> Iterator[None]:
    """Everything that any Patches replaced as it was before, for the time of the context."""
    with ExitStack() as stack:
        for patches in reversed(Patches._live):
            stack.enter_context(patches._suspended())
        yield


def _restore(owner: object, name: str, before: object) -> None:
    if before is not _ABSENT:
        setattr(owner, name, before)
    elif name in vars(owner):
        delattr(owner, name)
