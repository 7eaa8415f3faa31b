"""A value that is computed twice is the same both times.

Three things are looked at. The call is run again on copies of what it was given, with the same random numbers: results, writes
and gradients must have the same bits. It is run under `torch.utils.checkpoint`, whose backward computes the forward again:
gradients must have the same bits as without. And where compiled code ran, it is compared with eager code at exact cancellations
(see `cancellation`): the two need not be equal, but what cancels in one must cancel in the other.

Not seen: values inside a compiled backward that it computes again rather than keep. Only what becomes of them in gradients is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.checkpoint import checkpoint

from flatout.profiling.sites import Sites
from flatout.verification.promises.bits import differences
from flatout.verification.promises.cancellation import CancellationMode, uncancelled
from flatout.verification.promises.equality import uncompiled
from flatout.verification.promises.rerun import Outcome, Stage
from flatout.verification.promises.telling import Breach, rows_of

PROMISE = "recomputed='equal'"


def when_recomputed(
    stage: Stage, first: Outcome, function: Callable[..., Any], *, is_compiled: bool, sites: Sites
) -> Iterator[Breach]:
    """The breaches of `recomputed='equal'`, the first of each kind."""
    has_own_backward = bool(first.gradients)
    again = stage.again(function, with_gradients=not has_own_backward)
    expected = first if has_own_backward else first._replace(gradients=again.gradients)
    for difference in differences(again.all(), expected.all(), "the first run"):
        advice = "an operator whose sums have no fixed order, or state that is not a tensor: torch.use_deterministic_algorithms"
        yield Breach(PROMISE, f"run again, {difference.name} is another: {difference.text}", (), advice)
        return
    if again.gradients and not has_own_backward:
        yield from _under_checkpoint(stage, expected, function)
    if is_compiled:
        yield from _at_cancellations(stage, expected, function, sites, with_gradients=not has_own_backward)


def _under_checkpoint(stage: Stage, expected: Outcome, function: Callable[..., Any]) -> Iterator[Breach]:
    def recomputing(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(function, *args, use_reentrant=False, **kwargs)

    outcome = stage.again(recomputing, with_gradients=True)
    mine = {**outcome.outputs, **outcome.gradients}
    for difference in differences(mine, {**expected.outputs, **expected.gradients}, "the run without"):
        yield Breach(
            PROMISE,
            f"under torch.utils.checkpoint, {difference.name} is another: {difference.text}",
            (),
            "the forward that the backward runs again comes out differently; does it read a state that the first one changed?",
        )
        return


def _at_cancellations(
    stage: Stage, ours: Outcome, function: Callable[..., Any], sites: Sites, *, with_gradients: bool
) -> Iterator[Breach]:
    mode = CancellationMode(sites)

    def watched(*args: Any, **kwargs: Any) -> Any:
        with mode:
            return function(*args, **kwargs)

    eager = stage.again(uncompiled(watched), with_gradients=with_gradients)
    for name, text in uncancelled(ours.all(), eager.all()):
        if mode.found:
            rows = rows_of(sites, ((f"{c.op} leaves exactly 0 in eager", c.site) for c in mode.found))
            yield Breach(
                PROMISE,
                f"{name} is {text}: the compiler rounds one of two equal products or sums another way",
                rows,
                "compute the difference in one expression without products ((x - y) * (x + y)), clamp what goes into the root or "
                "logarithm, or keep the compiler from fusing multiply-adds",
            )
            return
