"""In which order compositions are tried. Pure: what came of each is asked for, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

from flatout.records.lever import KINDS, Kind, Offer
from flatout.records.shrinking import Objective, Point, Tried, Untried
from flatout.shrinking.front import gain, is_within

Composition = tuple[Offer, ...]
GIVEN: Final = "as it is"
_ENDS: Final = 2
"""So many of the best ways to run the given model are tried on each smaller one."""


def name_of(composition: Composition) -> str:
    """As it stands in tables.

    >>> name_of((Offer(lever="a", name="half the channels"), Offer(lever="b", name="int8")))
    'half the channels + int8'
    """
    return " + ".join(offer.name for offer in composition) or GIVEN


class Explorer:
    """Tries compositions until there are none left worth it, or `is_over` says that time is up.

    First every lever that leaves the weights' number as it is, alone and with what runs it; then each ladder of sizes, from the
    mildest rung up to the first that loses more than is allowed even after it was trained again; then the best ends on each size.
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
        """`kinds` tells of each lever's id what it does; `allowed_loss` is asked once the given model was measured."""
        self.points: list[Point] = []
        self.untried: list[Untried] = []
        self._made: dict[str, Composition] = {}
        self._attempt, self._kinds = attempt, kinds
        self._objective, self._allowed, self._is_over = objective, allowed_loss, is_over

    def composition(self, name: str) -> Composition:
        """What a point of this name is made of."""
        return self._made[name]

    def run(self) -> None:
        """Try them all. Raises what the attempt at the given model raises."""
        first = self._tried(())
        if first is None or first.point is None:
            return
        self.untried += first.refused
        if self._objective == "train-cost":
            for offer in self._of(first.offers, "training"):
                self._tried((offer,))
            return
        ends = [end for end in self._ends((), first.offers) if self._is_good(end)]
        ends.sort(key=self._gain, reverse=True)
        for size in [*self._sizes(first.offers)]:
            for end in ends[:_ENDS]:
                self._tried((*size, *self._made[end.name]))

    def _ends(self, before: Composition, offers: Sequence[Offer]) -> Iterator[Point]:
        """Fewer bits, each with what runs it; and what runs it alone."""
        for offer in self._of(offers, "bits", "engine"):
            composition = (*before, offer)
            tried = self._tried(composition)
            if tried is None or tried.point is None:
                continue
            yield tried.point
            if self._is_good(tried.point):
                yield from self._ends(composition, self._of(tried.offers, "engine"))

    def _sizes(self, offers: Sequence[Offer]) -> Iterator[Composition]:
        """Sizes that keep the metric, the smallest of each ladder first."""
        ladders: dict[str, list[Offer]] = {}
        for offer in self._of(offers, "size"):
            ladders.setdefault(offer.lever, []).append(offer)
        for ladder in ladders.values():
            kept: list[Composition] = []
            for offer in sorted(ladder, key=lambda o: o.rung):
                composition = self._recovered((offer,))
                if composition is None:
                    break
                kept.append(composition)
            yield from reversed(kept)

    def _recovered(self, size: Composition) -> Composition | None:
        """The size alone where that keeps the metric, else trained again; None where neither does."""
        tried = self._tried(size)
        if tried is None or tried.point is None:
            return None
        if is_within(tried.point, self._allowed()):
            return size
        for offer in self._of(tried.offers, "recovery"):
            again = self._tried((*size, offer))
            if again is not None and again.point is not None and is_within(again.point, self._allowed()):
                return (*size, offer)
        return None

    def _tried(self, composition: Composition) -> Tried | None:
        name = name_of(composition)
        if name in self._made:
            return None
        self._made[name] = composition
        if composition and self._is_over():
            self.untried.append(Untried(name=name, because="the time was up"))
            return None
        tried = self._attempt(composition)
        if tried.point is None:
            self.untried.append(Untried(name=name, because=tried.because))
        else:
            self.points.append(tried.point)
        return tried

    def _of(self, offers: Iterable[Offer], *kinds: Kind) -> list[Offer]:
        """Those of these kinds, in the order of kinds."""
        found = [offer for offer in offers if self._kinds[offer.lever] in kinds]
        return sorted(found, key=lambda offer: KINDS.index(self._kinds[offer.lever]))

    def _gain(self, point: Point) -> float:
        return gain(point, self.points[0], self._objective)

    def _is_good(self, point: Point) -> bool:
        return is_within(point, self._allowed()) and self._gain(point) > 1
