"""The order in which compositions are tried; pure, since what came of each is asked for, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

from flatout.core.records.reduction import KINDS, Kind, Option
from flatout.core.records.shrink import Objective, Point, Tried, Untried
from flatout.shrink.compose.ranking import gain, is_within

Composition = tuple[Option, ...]
ORIGINAL: Final = "as it is"
_ENDS: Final = 2
"""Number of the best ways to run the original model that are tried on each smaller one."""


def composition_name(composition: Composition) -> str:
    """Name of a composition as it stands in tables.

    >>> composition_name((Option(reduction="a", name="half the channels"), Option(reduction="b", name="int8")))
    'half the channels + int8'
    """
    return " + ".join(option.name for option in composition) or ORIGINAL


class Explorer:
    """Tries compositions until there are none left worth it, or `is_over` says that time is up.

    First every reduction that leaves the weights' number as it is, alone and with what runs it; then each ladder of sizes,
    from the
    mildest step up to the first that loses more than is allowed even after it was trained again; then the best ends on each size.
    """

    def __init__(
        self,
        attempt: Callable[[Composition], Tried],
        kinds: dict[str, Kind],
        *,
        objective: Objective,
        allowed_loss: Callable[[], float],
        is_over: Callable[[], bool],
    ) -> None:
        """`kinds` has the kind of each reduction by id; `allowed_loss` is asked once the original model was measured."""
        self.points: list[Point] = []
        self.untried: list[Untried] = []
        self._compositions: dict[str, Composition] = {}
        self._attempt, self._kinds = attempt, kinds
        self._objective, self._allowed, self._is_over = objective, allowed_loss, is_over

    def composition(self, name: str) -> Composition:
        """What a point of this name is made of."""
        return self._compositions[name]

    def run(self) -> None:
        """Try them all. Raises what the attempt at the original model raises."""
        first = self._tried(())
        if first is None or first.point is None:
            return
        self.untried += first.refused
        if self._objective == "train-cost":
            for option in self._of(first.options, "training"):
                self._tried((option,))
            return
        ends = [end for end in self._ends((), first.options) if self._is_good(end)]
        ends.sort(key=self._gain, reverse=True)
        for size in [*self._sizes(first.options)]:
            for end in ends[:_ENDS]:
                self._tried((*size, *self._compositions[end.name]))

    def _ends(self, before: Composition, options: Sequence[Option]) -> Iterator[Point]:
        """Fewer bits, each with what runs it; and what runs it alone."""
        for option in self._of(options, "bits", "engine"):
            composition = (*before, option)
            tried = self._tried(composition)
            if tried is None or tried.point is None:
                continue
            yield tried.point
            if self._is_good(tried.point):
                yield from self._ends(composition, self._of(tried.options, "engine"))

    def _sizes(self, options: Sequence[Option]) -> Iterator[Composition]:
        """Sizes that keep the metric, the smallest of each ladder first."""
        ladders: dict[str, list[Option]] = {}
        for option in self._of(options, "size"):
            ladders.setdefault(option.reduction, []).append(option)
        for ladder in ladders.values():
            sizes: list[Composition] = []
            for option in sorted(ladder, key=lambda o: o.step):
                composition = self._recovered((option,))
                if composition is None:
                    break
                sizes.append(composition)
            yield from reversed(sizes)

    def _recovered(self, size: Composition) -> Composition | None:
        """The size alone where that keeps the metric, else trained again; None where neither does."""
        tried = self._tried(size)
        if tried is None or tried.point is None:
            return None
        if is_within(tried.point, self._allowed()):
            return size
        for option in self._of(tried.options, "recovery"):
            again = self._tried((*size, option))
            if again is not None and again.point is not None and is_within(again.point, self._allowed()):
                return (*size, option)
        return None

    def _tried(self, composition: Composition) -> Tried | None:
        name = composition_name(composition)
        if name in self._compositions:
            return None
        self._compositions[name] = composition
        if composition and self._is_over():
            self.untried.append(Untried(name=name, because="the time was up"))
            return None
        tried = self._attempt(composition)
        if tried.point is None:
            self.untried.append(Untried(name=name, because=tried.because))
        else:
            self.points.append(tried.point)
        return tried

    def _of(self, options: Iterable[Option], *kinds: Kind) -> list[Option]:
        """Those of these kinds, in the order of kinds."""
        found = [option for option in options if self._kinds[option.reduction] in kinds]
        return sorted(found, key=lambda option: KINDS.index(self._kinds[option.reduction]))

    def _gain(self, point: Point) -> float:
        return gain(point, self.points[0], self._objective)

    def _is_good(self, point: Point) -> bool:
        return is_within(point, self._allowed()) and self._gain(point) > 1
