"""A made-up script whose levers have known effects, for tests of the search."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from flatout.core.records.lever import Candidate, Lever, PlannedLever
from flatout.core.records.verdict import Difference, Equality, Footprint, Guarantee, Speed, Verdict
from flatout.tune.search.goal import Objective

STEP_S = 0.1
PEAK_BYTES = 1000


class World:
    """Each lever multiplies the step's time; pairs of levers may change that; some are wrong, some crash."""

    def __init__(
        self,
        factors: Mapping[str, float],
        *,
        together: Mapping[tuple[str, str], float] | None = None,
        wrong: Sequence[str] = (),
        crashing: Sequence[str] = (),
        most: int = 1000,
        smaller: Mapping[str, int] | None = None,
        later_s: Mapping[str, float] | None = None,
        idle: Sequence[str] = (),
        num_run: int = 0,
        noise: float = 0.01,
        final_noise: float | None = None,
        latest: int = 1000,
        error: str = "it was killed by signal 11",
    ) -> None:
        """`later_s`: what levers add to the first 8 steps; `num_run`: the steps that the script has, where it ends; `idle`:
        levers that meet nothing to change.

        `noise` is the half width of the interval of a ratio, relative to it; a quarter of that in a longer race and, where
        `final_noise` is not another, in the final one. After `latest` comparisons the final one would end too late.
        `error` is what is said of a script that crashes.
        """
        self.noise = noise
        self.final_noise = noise / 4 if final_noise is None else final_noise
        self.latest = latest
        self.later_s = dict(later_s or {})
        self.idle = set(idle)
        self.num_run = num_run
        self.smaller = dict(smaller or {})
        self.factors = dict(factors)
        self.together = dict(together or {})
        self.wrong = set(wrong)
        self.crashing = set(crashing)
        self.error = error
        self.num_compared = 0
        self.expected: list[list[tuple[str, ...]]] = []
        self.most = most

    def step_s(self, levers: Sequence[PlannedLever]) -> float:
        ids = [p.id for p in levers]
        seconds = STEP_S
        for id in ids:
            seconds *= self.factors[id]
        for (one, two), factor in self.together.items():
            if one in ids and two in ids:
                seconds *= factor
        return seconds

    def is_right(self, levers: Sequence[PlannedLever]) -> bool:
        return not self.wrong & {p.id for p in levers}

    def has_time(self, *, is_final: bool, effort: float = 1.0, is_longer: bool = False) -> bool:
        return (is_final and not is_longer) or self.num_compared < self.most

    def can_end(self, effort: float) -> bool:
        return self.num_compared < self.most

    def has_time_for_each(self, efforts: Sequence[float]) -> bool:
        return self.num_compared + len(efforts) <= self.most

    def expect(self, pairs: Sequence[tuple[Sequence[PlannedLever], Sequence[PlannedLever]]]) -> None:
        self.expected.append([tuple(p.id for p in after) for _, after in pairs])

    def is_late(self) -> bool:
        return self.num_compared >= self.latest

    def peak_bytes(self, levers: Sequence[PlannedLever]) -> int:
        return PEAK_BYTES - sum(self.smaller.get(p.id, 0) for p in levers)

    def compare(
        self,
        before: Sequence[PlannedLever],
        after: Sequence[PlannedLever],
        *,
        objective: Objective,
        is_final: bool,
        is_longer: bool = False,
    ) -> Verdict:
        self.num_compared += 1
        noise = self.noise / 4 if is_longer else self.final_noise if is_final else self.noise
        ids = {p.id for p in after}
        ratio = self.step_s(before) / self.step_s(after)
        first_s = [1.0 + sum(self.later_s.get(p.id, 0.0) for p in side) for side in (before, after)]
        speed = Speed(
            ratio=ratio,
            low=(1 - noise) * ratio,
            high=(1 + noise) * ratio,
            num_pairs=9,
            before_s=STEP_S,
            after_s=STEP_S / ratio,
            num_first=8,
            first_before_s=first_s[0],
            first_after_s=first_s[1],
            num_run=self.num_run,
        )
        if ids & self.crashing:
            return verdict(Equality(guarantee="bounded", holds=None), None, "different", self.error)
        if not self.is_right(after):
            first = Difference(step=1, what="gradient", tensor="Net.weight", error=1.0, allowed=1e-6)
            wrong = Equality(guarantee="bounded", holds=False, num_steps=8, first=first)
            return verdict(wrong, None, "different", "the steps differ")
        outcome = "proved" if speed.is_faster else "slower" if speed.is_slower else "unknown"
        one, two = self.peak_bytes(before), self.peak_bytes(after)
        if objective == "memory":
            outcome = "proved" if two < one else "slower" if two > one else "unknown"
        size = Footprint(device="cpu", before_bytes=one, after_bytes=two, fraction=(two / one, two / one))
        found = verdict(Equality(guarantee="bounded", holds=True, num_steps=8), speed, outcome, outcome, size)
        return msgspec.structs.replace(found, missed=tuple(p.id for p in after if p.id in self.idle))


def verdict(
    equality: Equality, speed: Speed | None, outcome: Any, because: str, size: Footprint | None = None
) -> Verdict:
    return Verdict(
        before="train.py",
        after="train.py",
        equality=equality,
        speed=speed,
        footprints=(size,) if size is not None else (),
        outcome=outcome,
        because=because,
        device="cpu",
        torch="2.13.0",
        python="3.11",
    )


def lever(id: str, *, guarantee: Guarantee = "bounded", conflicts: tuple[str, ...] = ()) -> Lever:
    def propose(evidence: object, findings: object) -> Iterator[Candidate]:
        return iter(())

    return Lever(
        id=id,
        title=id,
        guarantee=guarantee,
        module=__name__,
        propose=propose,  # type: ignore[arg-type]
        apply=lambda hooks, parameters: None,
        conflicts=conflicts,
    )


def candidate(id: str, saved_s: float, *, saved_bytes: int = 0, **parameters: Any) -> Candidate:
    return Candidate(
        lever=id,
        saved_s=(0.5 * saved_s, saved_s),
        saved_bytes=saved_bytes,
        parameters=parameters,
        because="it should help",
    )
