"""Who sits where, and whether to go on: decided from the failures so far, without touching a process."""

from __future__ import annotations

from typing import Final, NamedTuple

from flatout.errors import UsageError
from flatout.surviving.account import Failure

PATIENCE: Final = 3
"""Exceptions in a row without progress after which a bug is taken for one; failures in a row of a slot until it is left out."""
_MORE_PATIENCE: Final = 10
"""Other failures in a row without progress: a machine may kill for a while."""


class Place(NamedTuple):
    """One rank's: the node, and the slot of that node."""

    node: int
    slot: int


class GivenUp(Exception):
    """The job is not started again; says why."""


class Policy:
    """Counts failures. `places` says where ranks sit in the next epoch, by rank; `failed` raises GivenUp where there is none."""

    def __init__(self, *, least_ranks: int, max_restarts: int | None = None) -> None:
        if least_ranks < 1 or (max_restarts is not None and max_restarts < 0):
            raise UsageError(
                f"least_ranks is {least_ranks}, max_restarts {max_restarts}; give 1 or more, and 0 or more"
            )
        self._least, self._max = least_ranks, max_restarts
        self._slots: dict[int, tuple[int, list[int]]] = {}
        self._failures: list[Failure] = []
        self._best = -1
        self._same = 0
        self._blamed: tuple[Place, int] = (Place(-1, -1), 0)

    def join(self, node: int, *, num_wanted: int, num_slots: int) -> None:
        """A node is there, with so many slots in good order."""
        self._slots[node] = (num_wanted, list(range(num_slots)))

    def leave(self, node: int) -> None:
        """A node is gone."""
        self._slots.pop(node, None)

    @property
    def nodes(self) -> list[int]:
        """That are there."""
        return sorted(self._slots)

    @property
    def places(self) -> list[Place]:
        """By rank. Raises GivenUp when there are fewer than the least."""
        found = [Place(node, slot) for node, (wanted, slots) in sorted(self._slots.items()) for slot in slots[:wanted]]
        if len(found) < self._least:
            raise GivenUp(f"{len(found)} ranks are left of the {self._least} that are needed at least")
        return found

    def failed(self, failure: Failure, *, progress: int) -> None:
        """Note a failure after so much progress (steps). Raises GivenUp."""
        self._failures.append(failure)
        if progress > self._best:
            self._best, self._same = progress, 0
        self._same += 1
        if self._max is not None and len(self._failures) > self._max:
            raise GivenUp(f"it was started again {self._max} times, as often as allowed; last: {failure.text}")
        if self._is_left_out(failure):
            self._same = 0
            return
        recent = self._failures[-self._same :]
        if self._same >= PATIENCE and all(f.kind == "exception" for f in recent[-PATIENCE:]):
            raise GivenUp(f"{PATIENCE} times in a row without a step of progress, rank {failure.rank}: {failure.text}")
        if self._same >= _MORE_PATIENCE:
            raise GivenUp(f"{self._same} failures in a row without a step of progress; last: {failure.text}")

    def _is_left_out(self, failure: Failure) -> bool:
        """Whether the slot has failed so often that it is used no more: another takes its place, or there are fewer ranks.

        An exception may be a bug, which would fail anywhere: for it a slot is left only where there is a spare.
        """
        place = Place(failure.node, failure.slot)
        if failure.slot < 0:
            self._blamed = (place, 0)
            return False
        self._blamed = (place, self._blamed[1] + 1 if self._blamed[0] == place else 1)
        wanted, slots = self._slots.get(place.node, (0, []))
        if self._blamed[1] < PATIENCE or place.slot not in slots:
            return False
        has_spare = len(slots) > wanted
        num_after = len(self.places) - (0 if has_spare else 1)
        if num_after < self._least or (failure.kind == "exception" and not has_spare):
            return False
        slots.remove(place.slot)
        self._blamed = (Place(-1, -1), 0)
        return True
