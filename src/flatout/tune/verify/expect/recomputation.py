"""A value that is computed twice is the same both times.

Three things are looked at. The call is run again on copies of what it was given, with the same random numbers: results, writes
and gradients must have the same bits. It is run under `torch.utils.checkpoint`, whose backward computes the forward again:
gradients must have the same bits as without. And where compiled code ran, it is compared with eager code at exact cancellations
(see `equality`): the two need not be equal, but what cancels in one must cancel in the other.

Not seen: values inside a compiled backward that it computes again rather than keep. Only what becomes of them in gradients is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from torch.utils.checkpoint import checkpoint

from flatout.core.runtime.source_sites import Sites
from flatout.tune.verify.expect.bits import differences
from flatout.tune.verify.expect.equality import CancellationMode, uncancelled, uncompiled
from flatout.tune.verify.expect.messages import Breach, rows_of
from flatout.tune.verify.expect.rerun import CallOutcome, CallReplay

EXPECTATION = "recomputed='equal'"


def when_recomputed(
    replay: CallReplay, first: CallOutcome, function: Callable[..., Any], *, is_compiled: bool, sites: Sites
) -> Iterator[Breach]:
    """The breaches of `recomputed='equal'`, the first of each kind."""
    has_own_backward = bool(first.gradients)
    again = replay.again(function, with_gradients=not has_own_backward)
    expected = first if has_own_backward else first._replace(gradients=again.gradients)
    for difference in differences(again.all(), expected.all(), "the first run"):
        advice = "an operator whose sums have no fixed order, or state that is not a tensor: torch.use_deterministic_algorithms"
        yield Breach(EXPECTATION, f"run again, {difference.name} is another: {difference.text}", (), advice)
        return
    if again.gradients and not has_own_backward:
        yield from _under_checkpoint(replay, expected, function)
    if is_compiled:
        yield from _at_cancellations(replay, expected, function, sites, with_gradients=not has_own_backward)


def _under_checkpoint(replay: CallReplay, expected: CallOutcome, function: Callable[..., Any]) -> Iterator[Breach]:
    def recomputing(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(function, *args, use_reentrant=False, **kwargs)

    outcome = replay.again(recomputing, with_gradients=True)
    mine, theirs = ({**o.outputs, **o.gradients} for o in (outcome, expected))
    for difference in islice(differences(mine, theirs, "the run without"), 1):
        yield Breach(
            EXPECTATION,
            f"under torch.utils.checkpoint, {difference.name} is another: {difference.text}",
            (),
            "the forward that the backward runs again comes out differently; does it read a state that the first one changed?",
        )


def _at_cancellations(
    replay: CallReplay, ours: CallOutcome, function: Callable[..., Any], sites: Sites, *, with_gradients: bool
) -> Iterator[Breach]:
    mode = CancellationMode(sites)

    def watched(*args: Any, **kwargs: Any) -> Any:
        with mode:
            return function(*args, **kwargs)

    eager = replay.again(uncompiled(watched), with_gradients=with_gradients)
    for name, text in islice(uncancelled(ours.all(), eager.all()), int(bool(mode.found))):
        yield Breach(
            EXPECTATION,
            f"{name} is {text}: the compiler rounds one of two equal products or sums another way",
            rows_of(sites, ((f"{c.op} leaves exactly 0 in eager", c.site) for c in mode.found)),
            "compute the difference in one expression without products ((x - y) * (x + y)), clamp what goes into the root or "
            "logarithm, or keep the compiler from fusing multiply-adds",
        )
