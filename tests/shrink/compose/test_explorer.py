from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.shrink.compose.test_ranking import point

from flatout.core.errors import PlanError
from flatout.core.records.allowance import Allowance
from flatout.core.records.reduction import Kind, Option, Reduction
from flatout.core.records.shrink import Objective, Tried, Untried
from flatout.shrink.compose.explorer import Composition, Explorer, composition_name
from flatout.shrink.compose.shrink import ShrinkSettings, find_cheapest

KINDS: dict[str, Kind] = {"prune": "size", "distil": "recovery", "bits": "bits", "native": "engine", "lora": "training"}
PRUNE = [Option(reduction="prune", name=f"prune {n}", step=n) for n in (1, 2, 3)]
DISTIL, BITS, NATIVE = (Option(reduction=name, name=name) for name in ("distil", "bits", "native"))


class World:
    """A bench whose figures are known: what each reduction does to time and metric; trained again, a size loses a third of it."""

    def __init__(self, *, lost: Callable[[int], float] = lambda step: 0.05 * step, broken: str = "") -> None:
        self.asked: list[str] = []
        self._lost, self._broken = lost, broken

    def tried(self, composition: Composition, *, allowed_loss: float, times: float = 1.0) -> Tried:
        name = composition_name(composition)
        self.asked.append(name)
        if self._broken and self._broken in name:
            return Tried(because="it broke")
        s, lost, kinds = 1.0, 0.0, [KINDS[o.reduction] for o in composition]
        for option in composition:
            if option.reduction == "prune":
                s, lost = s / (1 + option.step), self._lost(option.step)
            elif option.reduction == "distil":
                lost /= 3
            else:
                s /= {"bits": 1.5, "native": 4.0, "lora": 2.0}[option.reduction]
        options = {"size": PRUNE, "recovery": [DISTIL], "bits": [BITS], "engine": [NATIVE]}
        later = [
            o
            for kind, those in options.items()
            if kind not in kinds
            for o in those
            if not kinds or order(kind) > order(kinds[-1])
        ]
        if not kinds:
            later = [*PRUNE, BITS, NATIVE]
        return Tried(point=point(name, s=s, lost=lost, num_bytes=round(100 * s)), options=tuple(later))


def order(kind: str) -> int:
    return ["training", "size", "recovery", "bits", "engine"].index(kind)


def reduction(name: str) -> Reduction:
    return Reduction(
        id=name,
        title=name,
        guarantee="quality",
        module=__name__,
        kind=KINDS[name],
        options=lambda candidate: iter(()),
        apply=lambda candidate, parameters: candidate,
    )


REDUCTIONS = [reduction(name) for name in KINDS]


def settings(budget: str = "0.05", *, budget_s: float = 1e9, objective: Objective = "latency") -> ShrinkSettings:
    return ShrinkSettings("m:f", objective, Allowance.of(budget), is_cost=False, budget_s=budget_s)


def test_sizes_are_tried_up_to_the_first_that_loses_too_much_even_trained_again() -> None:
    world = World()  # trained again they lose 0.017, 0.033 and 0.05
    found, _ = find_cheapest(world, REDUCTIONS, settings("0.04"))
    assert "prune 2 + distil" in world.asked
    assert "prune 3 + distil" in world.asked
    assert not any(name.startswith("prune 3 + distil +") for name in world.asked)
    assert found.selected == "prune 2 + distil + bits + native"


def test_a_size_that_keeps_the_metric_is_not_trained_again() -> None:
    world = World(lost=lambda step: 0.0)
    find_cheapest(world, REDUCTIONS, settings())
    assert not any("distil" in name for name in world.asked)


def test_what_was_chosen_is_made_and_measured_once_more() -> None:
    world = World()
    found, composition = find_cheapest(world, REDUCTIONS, settings("0.04"))
    assert world.asked.count(found.selected) == 2
    assert composition_name(composition) == found.selected
    assert found.verdict.outcome == "proved"


def test_what_does_not_come_out_better_once_more_is_not_chosen() -> None:
    class Fickle(World):
        def tried(self, composition: Composition, *, allowed_loss: float, times: float = 1.0) -> Tried:
            found = super().tried(composition, allowed_loss=allowed_loss, times=times)
            if times > 1 and "prune" in composition_name(composition):
                return Tried(point=point(composition_name(composition), s=1.1))
            return found

    found, _ = find_cheapest(Fickle(), REDUCTIONS, settings("0.04"))
    assert found.selected == "bits + native"
    assert found.verdict.outcome == "proved"


def test_compositions_that_all_break_in_their_proof_leave_the_model_as_it_is() -> None:
    class Breaking(World):
        def tried(self, composition: Composition, *, allowed_loss: float, times: float = 1.0) -> Tried:
            return Tried(because="it broke") if times > 1 else super().tried(composition, allowed_loss=allowed_loss)

    found, composition = find_cheapest(Breaking(), REDUCTIONS, settings("0.04"))
    assert found.selected == "as it is"
    assert composition == ()
    assert found.verdict.speed is None


def test_a_composition_that_breaks_is_told_and_the_others_go_on() -> None:
    found, _ = find_cheapest(World(broken="native"), REDUCTIONS, settings("0.04"))
    assert Untried(name="native", because="it broke") in found.untried
    assert found.selected == "prune 2 + distil + bits"


def test_without_time_the_model_stays_as_it_is() -> None:
    found, composition = find_cheapest(World(), REDUCTIONS, settings(budget_s=-1.0))
    assert found.selected == "as it is"
    assert composition == ()
    assert {one.because for one in found.untried} == {"the time was up"}


def test_a_model_that_cannot_be_measured_ends_it() -> None:
    class Broken(World):
        def tried(self, composition: Composition, *, allowed_loss: float, times: float = 1.0) -> Tried:
            return Tried(because="no such file")

    with pytest.raises(PlanError, match="as it is cannot be measured: no such file"):
        find_cheapest(Broken(), REDUCTIONS, settings())


def test_training_is_tried_alone() -> None:
    class Training(World):
        def tried(self, composition: Composition, *, allowed_loss: float, times: float = 1.0) -> Tried:
            found = super().tried(composition, allowed_loss=allowed_loss, times=times)
            return Tried(point=found.point, options=(Option(reduction="lora", name="lora"),) if not composition else ())

    world = Training()
    found, _ = find_cheapest(world, REDUCTIONS, settings(objective="train-cost"))
    assert world.asked == ["as it is", "lora", "lora"]
    assert found.selected == "lora"


def test_no_composition_is_tried_twice_before_the_proof() -> None:
    world = World()
    explorer = Explorer(
        lambda c: world.tried(c, allowed_loss=0),
        KINDS,
        objective="latency",
        allowed_loss=lambda: 0.04,
        is_over=lambda: False,
    )
    explorer.run()
    assert len(world.asked) == len(set(world.asked))
