"""Are two recordings of the same steps equal, under which guarantee, and what is the first thing that is not?"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Final, NamedTuple

from torch import Tensor

from flatout.core.records.verdict import Difference, Equality, What
from flatout.tune.verify.recording import Step, is_module_output
from flatout.tune.verify.tensor_digests import TensorDigest, distance

FACTOR: Final = 4.0
"""A bounded change may have four times the rounding error of the steps before it. Two orders of one sum have the same bound, and
errors that differ by a few times (Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., section 4.2)."""
_ONE_TENSOR: Final = 4.0
"""One tensor alone may be off so many times more than all together: few numbers average little. So may parameters, which one
tensor can dominate: an update that divides by the gradient's size (Adam) makes long steps of the rounding of a zero gradient."""
_MOST: Final = 1.0
"""No error may be as large as the thing itself,"""
_AS_LOST: Final = 1.5
"""unless that of the steps before the change is about as large: then so many times it, errors of many numbers being near their
mean (and two unrelated gradients of one length root of 2 apart)."""
_LOST: Final = 0.5
"""Gradients that are so far off share no digit with the reference."""
_FLOAT32_EPS: Final = 2.0**-23
_FLOAT64_EPS: Final = sys.float_info.epsilon
_ORDER: Final[tuple[What, ...]] = ("loss", "output", "gradient", "parameter")
_SMALL: Final = 1e-3
"""A tensor whose norm is below this share of all of its kind is judged by that share: its own relative error says nothing."""


class Pair(NamedTuple):
    """One thing of one step: its error before the change and after it, relative to the reference, whose norm is `norm`."""

    step: int
    what: What
    tensor: str
    before: float
    after: float
    norm: float


def compare_exact(before: list[Step], after: list[Step]) -> Equality:
    """Equal bit for bit, or the first tensor that is not."""
    num = sum(len(digests) for step in before for digests in step.values())
    if not before:
        return Equality(guarantee="exact", holds=None, because="no step was recorded")
    first = next(_differing(before, after), None)
    return Equality(
        guarantee="exact",
        holds=first is None,
        num_steps=len(before),
        num_tensors=num,
        reference="before",
        worst=0.0 if first is None else math.inf,
        first=first,
    )


def _differing(before: list[Step], after: list[Step]) -> Iterator[Difference]:
    for number, (one, two) in enumerate(zip(before, after, strict=False), start=1):
        for what, name, a, b in _matched(one, two):
            if a is None or b is None:
                yield Difference(step=number, what=what, tensor=name, because=_missing(a, b))
            elif a.shape != b.shape:
                yield Difference(step=number, what=what, tensor=name, because=f"shape {b.shape} instead of {a.shape}")
            elif a.bits != b.bits:
                yield Difference(step=number, what=what, tensor=name, error=_relative(distance(a, b), a.norm))
    if len(after) != len(before):
        yield Difference(
            step=min(len(before), len(after)) + 1,
            what="step",
            tensor="",
            because=f"{len(after)} steps were recorded after the change, {len(before)} before it",
        )


def compare_bounded(
    before: list[Step],
    after: list[Step],
    reference: list[Step],
    *,
    eps: float,
    is_trusted: bool = False,
    noisy: Sequence[list[Step]] = (),
) -> Equality:
    """No worse against the reference than `FACTOR` times what the steps before the change are, or the first thing that is.

    The reference are the same steps in float64; `eps` is the spacing of the dtype in use: an error of a few of it is none.
    `noisy` are runs of the steps before the change under rounding noise: the error before it is the largest of all runs. Errors
    are those of all losses, all gradients, all parameters of a step together (`_Allowance` tells what each may be), and of each
    single tensor in the first step, where nothing has had the time to grow. A reference that the first step before the change is
    not close to (see `closeness`) is none, unless it is trusted: then it cannot be told.
    """
    if not before or not reference:
        return Equality(guarantee="bounded", holds=None, because="no step was recorded")
    num = sum(len(digests) for step in before for digests in step.values())
    outcome = partial(Equality, guarantee="bounded", num_steps=len(before), num_tensors=num)
    structure = next((d for d in _differing(before, after) if d.error is None), None)
    if structure is not None:
        return outcome(holds=False, factor=FACTOR, worst=math.inf, first=structure)
    pairs = list(_pairs([before, *noisy], after, reference))
    broken = next((p for p in pairs if p.step == 1 and not p.tensor and p.before > closeness(p.what, eps)), None)
    if broken is not None and not is_trusted:
        why = (
            f"the steps before the change are {broken.before:.2g} off the same steps in a finer precision ({broken.what}, step "
            "1): that is no rounding; random numbers that depend on the dtype, perhaps"
        )
        return outcome(holds=None, because=why)
    allowance = _Allowance(pairs, eps=eps)
    worst, first = 0.0, None
    for pair in pairs:
        limit = allowance.of(pair)
        excess = pair.after / limit if math.isfinite(pair.after) else math.inf
        worst = max(worst, excess)
        if excess > 1 and first is None:
            first = Difference(
                step=pair.step, what=pair.what, tensor=pair.tensor or "all together", error=pair.after, allowed=limit
            )
    lost = next((p.step for p in pairs if p.what == "gradient" and not p.tensor and p.before > _LOST), None)
    why = (
        f"from step {lost} on, gradients of the steps before the change share no digit with the reference: there, losses and "
        "parameters tell"
    )
    last = next((p for p in reversed(pairs) if not p.tensor and p.what in ("gradient", "output")), None)
    return outcome(
        holds=first is None,
        reference="float64",
        factor=FACTOR,
        worst=worst,
        before_error=last.before if last is not None else None,
        after_error=last.after if last is not None else None,
        first=first,
        because=why if lost is not None and first is None else "",
    )


class _Allowance:
    """What errors may be, by what those of the steps before the change are.

    - Losses and outputs: `FACTOR` times the largest of all steps. One number's error is near zero by luck in many a step.
    - Gradients: `FACTOR` times the largest so far. Parameters, and single tensors: four times that.
    - What parameters were allowed to be off shows in the next step: in the loss at most by the gradient's norm times theirs
      (Cauchy and Schwarz), in gradients by as much as it was magnified before the change in any step (a unit that
      changes its sign).
    """

    def __init__(self, pairs: list[Pair], *, eps: float) -> None:
        self._floor = 4 * eps
        self._together = {(p.what, p.step): p for p in pairs if not p.tensor}
        self._singles: dict[What, float] = {}
        for what in _ORDER:
            errors = sorted(p.before for p in pairs if p.tensor and p.what == what)
            self._singles[what] = errors[len(errors) // 2] if errors else 0.0
        steps = sorted({p.step for p in pairs})
        self._magnified = max((self._magnification(step) for step in steps), default=0.0)
        self._steps = steps

    def of(self, pair: Pair) -> float:
        """The largest error that this may have after the change."""
        if pair.tensor:
            own = max(pair.before, self._singles[pair.what])
            return min(_ONE_TENSOR * max(FACTOR * own, self._floor), max(_MOST, _AS_LOST * own))
        is_scalar = pair.what in ("loss", "output")
        observed_steps = self._steps if is_scalar else [s for s in self._steps if s <= pair.step]
        own = max(self._together[pair.what, s].before for s in observed_steps if (pair.what, s) in self._together)
        limit = max(FACTOR * own, self._floor)
        most = max(_MOST, _AS_LOST * own)
        if pair.what == "parameter":
            return min(_ONE_TENSOR * limit, most)
        return min(limit + self._handed_on(pair), most)

    def _handed_on(self, pair: Pair) -> float:
        """What may come of the parameters of the step before."""
        moved = self._together.get(("parameter", pair.step - 1))
        if moved is None:
            return 0.0
        if pair.what == "gradient":
            return self._magnified * moved.after
        slope = self._together.get(("gradient", pair.step))
        if pair.what != "loss" or slope is None or not pair.norm:
            return 0.0
        return slope.norm * moved.after * moved.norm / pair.norm

    def _magnification(self, step: int) -> float:
        """How many times the parameters' error the gradients' was in the step after, before the change."""
        moved, slope = self._together.get(("parameter", step)), self._together.get(("gradient", step + 1))
        if moved is None or slope is None or not moved.before:
            return 0.0
        return slope.before / moved.before


def closeness(what: What, eps: float) -> float:
    """How far the first step may be from a reference of the same numbers, for numbers with this spacing.

    Losses and outputs agree in half of their digits. Gradients and what they moved agree in a quarter: about a share `eps` of the
    units of a network with ReLU changes sign by rounding, each with its whole gradient, so that norms are off by the root of it,
    and every layer adds to that. (A ResNet-34 at 96 pictures: 2e-8 in the loss, 5e-3 in the gradient, in plain float32.)
    """
    return float(eps ** (1 / 2 if what in ("loss", "output") else 1 / 4))


def is_close(steps: list[Step], reference: list[Step]) -> bool:
    """Whether the first step in float32 is as close to the reference as rounding leaves it."""
    if not steps or not reference:
        return False
    pairs = _pairs([steps[:1]], steps[:1], reference[:1])
    return all(p.before <= closeness(p.what, _FLOAT32_EPS) for p in pairs if not p.tensor)


def is_same_start(steps: list[Step], others: list[Step], *, eps: float) -> bool:
    """Whether losses and outputs of the first step agree as far as rounding lets them: of the same data and random numbers."""
    if not steps or not others:
        return False
    pairs = _pairs([steps[:1]], steps[:1], others[:1])
    return all(p.before <= closeness(p.what, eps) for p in pairs if not p.tensor and p.what in ("loss", "output"))


def own_roundoff(steps: list[Step]) -> float:
    """The spacing next to 1 of the coarsest numbers of the first step.

    Steps in float64 are their own reference, so that nothing tells their error: then a thousand times their spacing, what a sum
    of a million numbers in another order may be off (Higham, section 4.2: the error grows with the root of their number).
    """
    coarsest = (
        max((digest.eps for digests in steps[0].values() for digest in digests.values()), default=0.0) if steps else 0.0
    )
    return coarsest if coarsest > _FLOAT64_EPS else 1000 * _FLOAT64_EPS


def _pairs(befores: Sequence[list[Step]], after: list[Step], reference: list[Step]) -> Iterator[Pair]:
    """Errors in the order in which a wrong result spreads: losses, outputs, gradients, parameters; all together, then each.

    That before the change is the largest of several runs.
    """
    num_steps = min(len(steps) for steps in (*befores, after, reference))
    for number in range(1, num_steps + 1):
        ones = [steps[number - 1] for steps in befores]
        two, exact = after[number - 1], reference[number - 1]
        for what in _ORDER:
            *runs, b, r = _comparable(what, [*ones, two, exact])
            names = [n for n in r if n in b and all(n in run and run[n].shape == r[n].shape for run in runs)]
            total = math.sqrt(sum(r[n].norm ** 2 for n in names))
            if not names:
                continue
            before = max(_together(run, r, names, total) for run in runs)
            yield Pair(number, what, "", before, _together(b, r, names, total), total)
            if number == 1:
                for name in names:
                    scale = max(r[name].norm, _SMALL * total)
                    off, off_after = (
                        max(_relative(distance(side[name], r[name]), scale) for side in sides) for sides in (runs, [b])
                    )
                    yield Pair(number, what, name, off, off_after, scale)


def _together(
    digests: Mapping[str, TensorDigest], exact: Mapping[str, TensorDigest], names: list[str], total: float
) -> float:
    return _relative(math.sqrt(sum(distance(digests[n], exact[n]) ** 2 for n in names)), total)


def _relative(gap: float, norm: float) -> float:
    """A distance over a norm; two zeros are equal."""
    if gap == 0:
        return 0.0
    return gap / norm if norm > 0 else math.inf


def _matched(one: Step, two: Step) -> Iterator[tuple[What, str, TensorDigest | None, TensorDigest | None]]:
    """What two steps hold under one name."""
    for what in _ORDER:
        a, b = _comparable(what, (one, two))
        for name in dict.fromkeys((*a, *b)):
            yield what, name, a.get(name), b.get(name)


def _comparable(what: What, sides: Sequence[Step]) -> list[Mapping[str, TensorDigest]]:
    """What several recordings of a step hold of one kind; without modules' outputs where one has more of them than another.

    They are recorded of calls without gradients alone: an evaluation that stopped building graphs has new ones, and compiled code
    and graphs hide them. Their names are numbers, so that none would be compared with its own.
    """
    found: list[Mapping[str, TensorDigest]] = [side.get(what, {}) for side in sides]
    if what == "output" and len({len(one) for one in found}) > 1 and all(side.get("loss") for side in sides):
        return [{name: d for name, d in one.items() if not is_module_output(name)} for one in found]
    return found


def with_names_of(before: list[Step], after: list[Step]) -> list[Step]:
    """The later steps, with the names of the earlier ones where they share none: a renamed class has its tensors in order."""
    renamed = []
    for one, two in zip(before, after, strict=False):
        step: Step = {}
        for what, digests in two.items():
            known = one.get(what, {})
            is_renamed = bool(digests) and len(known) == len(digests) and not known.keys() & digests.keys()
            step[what] = dict(zip(known, digests.values(), strict=True)) if is_renamed else digests
        renamed.append(step)
    return [*renamed, *after[len(renamed) :]]


def differ_in_losses(before: list[Step], after: list[Step]) -> bool:
    """Whether a step starts its backwards from another number of losses: a batch that goes through the model in parts."""
    return any(len(a.get("loss", {})) != len(b.get("loss", {})) for a, b in zip(before, after, strict=False))


def with_losses_added(steps: list[Step]) -> list[Step]:
    """The steps with the sum of all losses in their place, which is what gradients that add up are of."""
    return [{**step, "loss": {"sum of all": _added(step["loss"])}} if step.get("loss") else step for step in steps]


def _added(losses: Mapping[str, TensorDigest]) -> TensorDigest:
    total = sum(digest.sketch.sum() for digest in losses.values())
    assert isinstance(total, Tensor)
    return TensorDigest((), 0, abs(float(total)), total.reshape(1), max(digest.eps for digest in losses.values()))


def _missing(a: TensorDigest | None, b: TensorDigest | None) -> str:
    return "is there only after the change" if a is None else "is missing after the change"
