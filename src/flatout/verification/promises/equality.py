"""Equal to its eager self: the same call is run once more with compiling switched off, and what comes out is compared.

Compared are results, tensors that the function writes to, and gradients: those that it leaves itself, or those of a backward
from its results with fixed random cotangents, of one more compiled run. 'bitwise' asks for the same bits, 'bounded' for no more
error against the same call in float64 than eager has itself, by the measure of `flatout verify` (`verification.equality`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final, Literal

import torch

from flatout.records.verdict import What
from flatout.verification.equality import compare_bounded, own_roundoff
from flatout.verification.marks import Mark, mark_of
from flatout.verification.promises.bits import differences
from flatout.verification.promises.cancellation import uncancelled
from flatout.verification.promises.rerun import Outcome, Stage
from flatout.verification.promises.telling import Breach

Measure = Literal["bitwise", "bounded"]
_KINDS: Final[tuple[What, ...]] = ("output", "parameter", "gradient")

_ADVICE: Final = (
    "sums in another order and fused multiply-adds round differently: equal='bounded' allows that; random numbers of compiled "
    "code are others unless torch._inductor.config.fallback_random is set"
)


def against_eager(
    stage: Stage, first: Outcome, function: Callable[..., Any], eager: Callable[..., Any] | None, measure: Measure
) -> Iterator[Breach]:
    """The breach of `equal=`, if there is one; `eager` is what to compare with, None for the function itself, not compiled."""
    reference = eager or uncompiled(function)
    has_own_backward = bool(first.gradients)
    plain = stage.again(reference, with_gradients=not has_own_backward)
    if plain.gradients and not has_own_backward:
        first = first._replace(gradients=stage.again(function, with_gradients=True).gradients)
    promise = f"equal={measure!r}"
    if measure == "bitwise":
        for difference in differences(first.all(), plain.all(), "eager"):
            yield Breach(promise, f"{difference.name} differs from its eager self: {difference.text}", (), _ADVICE)
            return
        return
    exact = stage.again(reference, dtype=torch.float64, with_gradients=not has_own_backward)
    yield from _bounded(promise, first, plain, exact)


def _bounded(promise: str, first: Outcome, plain: Outcome, exact: Outcome) -> Iterator[Breach]:
    ours, theirs, reference = _step(first), _step(plain), _step(exact)
    told = compare_bounded([theirs], [ours], [reference], eps=own_roundoff([theirs]))
    if told.is_kept is None:
        yield Breach(promise, f"cannot be told: {told.because}")
    elif not told.is_kept and told.first is not None:
        why = (
            told.first.because
            or f"error {told.first.error:.2g} of its norm, where {told.first.allowed or 0:.2g} is allowed"
        )
        name = told.first.tensor if told.first.tensor != "all together" else f"all {told.first.what}s together"
        rows = tuple(f"{n} is {text}" for n, text in uncancelled(first.all(), plain.all()))
        yield Breach(promise, f"{name} is further from float64 than eager is: {why}", rows[:4])


def _step(outcome: Outcome) -> dict[What, dict[str, Mark]]:
    parts = (outcome.outputs, outcome.afterwards, outcome.gradients)
    return {kind: {n: mark_of(t) for n, t in part.items()} for kind, part in zip(_KINDS, parts, strict=True) if part}


def uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with torch.compile switched off while it runs."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.compiler.set_stance("force_eager"):
            return function(*args, **kwargs)

    return run
