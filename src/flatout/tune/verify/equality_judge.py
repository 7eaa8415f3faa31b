"""Judging what a changed script computes, by the steps of the script before the change."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

import msgspec

from flatout.core.records.verdict import Equality, Reference
from flatout.tune.verify.base_runs import BaseRuns
from flatout.tune.verify.conditions import roundoff
from flatout.tune.verify.equality import (
    closeness,
    compare_bounded,
    compare_exact,
    differ_in_losses,
    is_close,
    is_same_start,
    own_roundoff,
    with_losses_added,
    with_names_of,
)
from flatout.tune.verify.proof_terms import ProofTerms
from flatout.tune.verify.recording import Step
from flatout.tune.verify.side_process import Failed, Precision, Request

_NUM_NOISY: Final = 3
"""Runs under rounding noise: a fourth is off more than these in one case of four, and four times as much is allowed."""


class EqualityJudge:
    """Says whether a changed script computes what the base does, by recordings of `runs`."""

    def __init__(self, runs: BaseRuns, on_progress: Callable[[str], None]) -> None:
        self._runs = runs
        self._on_progress = on_progress

    @property
    def _terms(self) -> ProofTerms:
        return self._runs.terms

    def judge(self, after: Request, steps: list[Step]) -> Equality:
        """The change judged by its steps, and once more with ordered draws where its first losses are others.

        Where environments answer, bit for bit or with the base's answers.
        """
        terms = self._terms
        if self._runs.has_environments and terms.guarantee != "exact":
            exact = compare_exact(self._runs.steps(), steps)
            return exact if exact.holds else self._compared_with_answers(after)
        equality = self._compare(steps)
        if self._terms.guarantee == "exact" or equality.holds or not _differs_from_start(equality):
            return equality
        return self._compared_with_ordered_draws(after, steps) or equality

    def _compared_with_answers(self, after: Request) -> Equality:
        """The change judged on the answers that environments gave in the base's run: a rollout magnifies the last digits."""
        self._on_progress("the first steps once more, with the environment's answers of the first run")
        try:
            with self._runs.sharing("answers"):
                return self._compare(self._runs.first_steps(self._runs.recording(after)))
        except Failed as e:
            return Equality(guarantee=self._terms.guarantee, holds=None, because=str(e))

    def _compared_with_ordered_draws(self, after: Request, steps: list[Step]) -> Equality | None:
        """The change judged on random numbers that depend on shapes alone; None where it draws as before or differs all the same.

        It is equal then, and otherwise draws other numbers of the same distribution, which has to be allowed.
        """
        self._on_progress("the first steps once more, with random numbers that depend on shapes alone")
        try:
            with self._runs.sharing("ordered draws"):
                ordered = self._runs.first_steps(self._runs.recording(after))
                if compare_exact(steps[:1], ordered[:1]).holds:
                    return None
                equality = self._compare(ordered)
        except Failed:
            return None
        if equality.holds is not True:
            return None
        if self._terms.guarantee == "distribution":
            return msgspec.structs.replace(equality, guarantee="distribution")
        why = "it draws other random numbers of the same distribution (equal when both draw alike); see --allow distribution"
        return msgspec.structs.replace(equality, guarantee="distribution", holds=False, because=why)

    def _compare(self, after: list[Step]) -> Equality:
        terms, at = self._terms, self._terms.at
        base = self._runs.steps()
        after = with_names_of(base, after)
        exact = compare_exact(base, after)
        if terms.guarantee == "exact" or exact.holds:
            return exact
        try:
            first = [(at, 0), *((precision, 0) for _, precision in self._finer())]
            # what is judged at a coarser precision mostly is equal by the finer one
            self._runs.record_together(first[:2] if at else [*first, *self._more_to_judge_by(at)])
            rough = self._runs.steps(at)
        except Failed as e:
            why = f"not equal bit for bit, and no steps to measure the rounding by: {e}"
            return Equality(guarantee=terms.guarantee, holds=None, num_steps=len(base), first=exact.first, because=why)
        equality, reference = self._against_references(rough, after)
        if _may_be_rounding(equality, eps=_roundoff_of(rough, at)):
            self._runs.record_together(self._more_to_judge_by(at))
            equality = self._under_noise(rough, after, reference) or equality
        return msgspec.structs.replace(equality, at=at)

    def _against_references(self, rough: list[Step], after: list[Step]) -> tuple[Equality, list[Step] | None]:
        """The change judged by more precise runs of the same steps, and the run that judged it; None where there is none."""
        terms = self._terms
        found = Equality(guarantee=terms.guarantee, holds=None, num_steps=len(rough), because="no step was recorded")
        for name, dtype in self._finer():
            try:
                reference = self._runs.steps(dtype)
            except Failed as e:
                found = msgspec.structs.replace(found, because=f"there is no run in a finer precision ({name}): {e}")
                continue
            is_trusted = name == "float64" and self._is_reference(reference)
            found = _bounded(rough, after, reference, at=terms.at, name=name, is_trusted=is_trusted)
            if found.holds is not None:
                return found, reference
        return found, None

    def _under_noise(self, rough: list[Step], after: list[Step], reference: list[Step] | None) -> Equality | None:
        """The change judged by what rounding noise does to the steps before it; None where noisy runs are not of the same steps.

        One run of chaotic steps can be near the reference by luck, and a unit of ReLU that flips changes a gradient by per cents;
        random numbers that depend on the dtype leave no reference but the steps themselves.
        """
        terms = self._terms
        noisy = []
        for noise_seed in range(1, _NUM_NOISY + 1):
            try:
                steps = self._runs.steps(terms.at, noise_seed)
            except Failed:
                return None
            if not is_same_start(steps, rough, eps=max(_roundoff_of(rough, terms.at), self._coarsest_by_default)):
                return None
            noisy.append(steps)
        name: Reference = "noise"
        return _bounded(rough, after, reference or rough, at=terms.at, name=name, is_trusted=True, noisy=noisy)

    def _finer(self) -> Iterator[tuple[Reference, Precision]]:
        """Precisions finer than the one whose rounding counts, the cheapest first: beside 16 bits the script as it is will do."""
        if self._terms.at:
            yield "finer", self._strict if self._terms.at == "tf32" else ""
        yield "float64", "float64"

    @property
    def _coarsest_by_default(self) -> float:
        """The spacing of numbers that products in float32 may be rounded to: cuDNN takes TF32 unless it is told not to."""
        return roundoff("float32" if self._runs.device == "cpu" else "tf32")

    @property
    def _strict(self) -> Precision:
        """The script's own precision, without TF32."""
        return "" if self._runs.device == "cpu" else "strict"

    def _is_reference(self, steps: list[Step]) -> bool:
        """Whether steps in float64 are those of the script: so they are when the script in plain float32 comes close to them.

        What runs by default may be far off: convolutions on a GPU round to TF32.
        """
        try:
            return is_close(self._runs.steps(self._strict), steps)
        except Failed:
            return False

    def _more_to_judge_by(self, at: str) -> list[tuple[str, int]]:
        """Precisions and noise seeds of the runs that are wanted where a finer one alone does not judge."""
        return [(self._strict, 0), *((at, 1 + i) for i in range(_NUM_NOISY))]


def _bounded(
    rough: list[Step],
    after: list[Step],
    reference: list[Step],
    *,
    at: str,
    name: Reference,
    is_trusted: bool,
    noisy: Sequence[list[Step]] = (),
) -> Equality:
    """`compare_bounded`, with losses added up where a step starts its backwards from another number of them."""
    if differ_in_losses(rough, after):
        rough, after, reference, *noisy = map(with_losses_added, (rough, after, reference, *noisy))
    eps = _roundoff_of(rough, at)
    equality = compare_bounded(rough, after, reference, eps=eps, is_trusted=is_trusted, noisy=noisy)
    return msgspec.structs.replace(equality, reference=name)


def _differs_from_start(equality: Equality) -> bool:
    """Whether the first loss or output is another number already, or nothing is known of it."""
    first = equality.first
    return first is None or (first.step == 1 and first.what in ("loss", "output") and first.error is not None)


def _may_be_rounding(equality: Equality, *, eps: float) -> bool:
    """Whether a change that was not found equal may be after all: rounding leaves half of the digits of the first loss."""
    first = equality.first
    if equality.holds or first is None:
        return not equality.holds
    return first.error is not None and (not _differs_from_start(equality) or first.error <= closeness(first.what, eps))


def _roundoff_of(steps: list[Step], at: str) -> float:
    return roundoff(at) if at else own_roundoff(steps)
