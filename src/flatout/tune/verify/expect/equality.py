"""Equal to its eager self: the same call is run once more with compiling switched off, and what comes out is compared.

Compared are results, tensors that the function writes to, and gradients: those that it leaves itself, or those of a backward
from its results with fixed random cotangents, of one more compiled run. 'bitwise' asks for the same bits, 'bounded' for no more
error against the same call in float64 than eager has itself, by the measure of `flatout verify` (`verification.equality`).

What breaks are exact cancellations: two numbers that were computed in two ways, rounded alike, and leave nothing when they are
subtracted. A compiler rounds one of the two ways differently, with a fused multiply-add that keeps the product whole:
x * x - y * y is 0 for x = y, and fma(x, x, -(y * y)) is the rounding error of y * y. The root of that, its logarithm or its
inverse is NaN or infinite, or merely huge.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Final, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from flatout.core.records.verdict import What
from flatout.core.runtime.source_sites import Sites
from flatout.tune.verify.equality import compare_bounded, own_roundoff
from flatout.tune.verify.expect.bits import differences, first_pair
from flatout.tune.verify.expect.messages import Breach
from flatout.tune.verify.expect.rerun import CallOutcome, CallReplay
from flatout.tune.verify.tensor_digests import TensorDigest, digest_of

Measure = Literal["bitwise", "bounded"]
_KINDS: Final[tuple[What, ...]] = ("output", "parameter", "gradient")
_SUMS: Final = ("aten::sub", "aten::sub_", "aten::rsub", "aten::add", "aten::add_")
_ADVICE: Final = (
    "sums in another order and fused multiply-adds round differently: equal='bounded' allows that; random numbers of compiled "
    "code are others unless torch._inductor.config.fallback_random is set"
)


def against_eager(
    replay: CallReplay,
    first: CallOutcome,
    function: Callable[..., Any],
    eager: Callable[..., Any] | None,
    measure: Measure,
) -> Iterator[Breach]:
    """The breach of `equal=`, if there is one; `eager` is what to compare with, None for the function itself, not compiled."""
    reference = eager or uncompiled(function)
    has_own_backward = bool(first.gradients)
    plain = replay.again(reference, with_gradients=not has_own_backward)
    if plain.gradients and not has_own_backward:
        first = first._replace(gradients=replay.again(function, with_gradients=True).gradients)
    expectation = f"equal={measure!r}"
    if measure == "bitwise":
        for difference in islice(differences(first.all(), plain.all(), "eager"), 1):
            yield Breach(expectation, f"{difference.name} differs from its eager self: {difference.text}", (), _ADVICE)
    else:
        exact = replay.again(reference, dtype=torch.float64, with_gradients=not has_own_backward)
        yield from _bounded(expectation, first, plain, exact)


def _bounded(expectation: str, first: CallOutcome, plain: CallOutcome, exact: CallOutcome) -> Iterator[Breach]:
    ours, theirs, reference = _step(first), _step(plain), _step(exact)
    comparison = compare_bounded([theirs], [ours], [reference], eps=own_roundoff([theirs]))
    if comparison.holds is None:
        yield Breach(expectation, f"cannot be told: {comparison.because}")
    elif (worst := comparison.first) is not None:
        why = worst.because or f"error {worst.error:.2g} of its norm, where {worst.allowed or 0:.2g} is allowed"
        name = worst.tensor if worst.tensor != "all together" else f"all {worst.what}s together"
        rows = tuple(f"{n} is {text}" for n, text in uncancelled(first.all(), plain.all()))
        yield Breach(expectation, f"{name} is further from float64 than eager is: {why}", rows[:4])


def _step(outcome: CallOutcome) -> dict[What, dict[str, TensorDigest]]:
    parts = (outcome.outputs, outcome.afterwards, outcome.gradients)
    return {kind: {n: digest_of(t) for n, t in part.items()} for kind, part in zip(_KINDS, parts, strict=True) if part}


def uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with torch.compile switched off while it runs."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.compiler.set_stance("force_eager"):
            return function(*args, **kwargs)

    return run


class Cancelled(NamedTuple):
    """Numbers that cancelled exactly in an operator of eager code, though neither of the two was 0; the index of the line."""

    op: str
    site: int
    number: int


class CancellationMode(TorchDispatchMode):
    """Looks at sums and differences of floating-point tensors while entered; `found` are those that cancelled."""

    supports_higher_order_operators = True

    def __init__(self, sites: Sites) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[Cancelled] = []
        self._sites = sites

    def __torch_dispatch__(
        self, func: Any, types: Sequence[Any], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func._schema.name if isinstance(func, torch._ops.OpOverload) else ""
        is_sum = name in _SUMS and len(args) > 1 and isinstance(args[0], Tensor) and args[0].is_floating_point()
        there = args[0] != 0 if is_sum else None
        out = func(*args, **(kwargs or {}))
        if there is not None and isinstance(args[1], Tensor):
            number = int((there & (out == 0)).sum())
            if number:
                self.found.append(Cancelled(name, self._sites.of_frame(sys._getframe(1)), number))
        return out


def uncancelled(compiled: Mapping[str, Tensor], eager: Mapping[str, Tensor]) -> Iterator[tuple[str, str]]:
    """What a cancellation that no longer is exact leaves: (tensor, a number in words) for each tensor that shows it.

    A number that eager has finite and compiled code has not, which is told first, or one that is exactly 0 in eager alone.
    """
    for name, ours in compiled.items():
        theirs = eager.get(name)
        if theirs is None or theirs.shape != ours.shape or not ours.is_floating_point() or not ours.numel():
            continue
        bad = (~ours.isfinite() & theirs.isfinite()) | ((theirs == 0) & (ours != 0))
        number = int(bad.sum())
        if number:
            worst = bad & ~ours.isfinite()
            pair = first_pair(ours, theirs, worst if worst.any() else bad, "eager")
            yield name, f"{pair}, {number} of {ours.numel()} numbers"
