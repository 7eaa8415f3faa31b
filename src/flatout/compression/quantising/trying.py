"""Each layer in each scheme, alone: how long its calls take beside the layer as it was, and how far its outputs move."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import nn

from flatout.compression.quantising.affine import Affine
from flatout.compression.quantising.calls import Calls, distance, in_float64
from flatout.compression.quantising.schemes import Scheme, refusal
from flatout.errors import FlatoutError, UsageError
from flatout.measure.timer import Clock, Timing, compare
from flatout.records.quantising import LayerChoice, SchemeTrial

FASTER: Final = 0.97
"""The upper end of a ratio's interval must lie below that: a layer alone is hotter in the cache than in its model."""
_PER_SCHEME_S: Final = 0.05
_MOST_S: Final = 1.0


class Tried(NamedTuple):
    """A layer's trials, and the modules of those that are faster, by scheme."""

    layer: LayerChoice
    made: dict[str, nn.Module]

    def trial(self, scheme: str) -> SchemeTrial:
        """The trial of a scheme."""
        return next(t for t in self.layer.trials if t.scheme == scheme)


def try_layer(
    path: str,
    layer: nn.Module,
    calls: Calls,
    schemes: Sequence[Scheme],
    *,
    seen: Mapping[str, Affine],
    clock: Clock | None,
) -> Tried:
    """Make the layer in all schemes, run its kept calls in interleaved rounds, and compare its first call with float64."""
    made: dict[str, nn.Module] = {}
    errors: dict[str, float] = {}
    refused: dict[str, str] = {}
    exact = in_float64(layer, calls.kept[0].args, calls.kept[0].kwargs)
    with torch.inference_mode():
        for scheme in schemes:
            found = _made(scheme, layer, seen.get(path), calls)
            if isinstance(found, str):
                refused[scheme.name] = found
                continue
            made[scheme.name] = found
            errors[scheme.name] = distance(calls.kept[0].run(found), exact)
        timings = _times(layer, made, calls, clock)
    scale = calls.num / len(calls.kept)
    trials = tuple(_trial(s.name, refused.get(s.name), timings.get(s.name), errors.get(s.name), scale) for s in schemes)
    faster = {t.scheme: made[t.scheme] for t in trials if t.ratio_high is not None and t.ratio_high < FASTER}
    call_s = timings[""].call_s.value * scale if timings else None
    why = "nothing was faster" if made else "no scheme takes it"
    choice = LayerChoice(path=path, kind=kind_of(layer), num_calls=calls.num, call_s=call_s, trials=trials, why=why)
    return Tried(choice, {name: faster[name] for name in _front(trials, faster)})


def kind_of(layer: nn.Module) -> str:
    """The type and the sizes of the first matrix.

    >>> kind_of(nn.Linear(3, 5))
    'Linear 5x3'
    """
    first = next((p for name, p in layer.named_parameters() if "weight" in name), None)
    return type(layer).__name__ + ("" if first is None else " " + "x".join(map(str, first.shape)))


def _made(scheme: Scheme, layer: nn.Module, seen: Affine | None, calls: Calls) -> nn.Module | str:
    """The layer in this scheme, after it has run once; or why not."""
    why = refusal(scheme, layer)
    if why is None and scheme.is_calibrated and seen is None:
        why = "it needs calibrate= batches"
    if why is not None:
        return why
    try:
        found = scheme.make(layer, seen).train(layer.training)
        calls.run(found)
    except (
        FlatoutError,
        RuntimeError,
        NotImplementedError,
        AssertionError,
        ValueError,
    ) as e:  # kernels of others refuse so
        return f"it does not run: {type(e).__name__}: {str(e).splitlines()[0][:160] if str(e) else ''}"
    return found


def _times(layer: nn.Module, made: Mapping[str, nn.Module], calls: Calls, clock: Clock | None) -> dict[str, Timing]:
    if not made:
        return {}

    def running(module: nn.Module) -> Callable[[], None]:
        return lambda: calls.run(module)

    runs: dict[str, Callable[[], object]] = {
        "": running(layer),
        **{name: running(module) for name, module in made.items()},
    }
    device = next(layer.parameters()).device
    return compare(
        runs, device=device, min_time_s=_PER_SCHEME_S * len(runs), max_time_s=_MOST_S * len(runs), clock=clock
    )


def _trial(name: str, refused: str | None, timing: Timing | None, error: float | None, scale: float) -> SchemeTrial:
    if refused is not None or timing is None:
        return SchemeTrial(scheme=name, why=refused or "not measured")
    if timing.ratio is None:
        return SchemeTrial(scheme=name, layer_error=error, why="below the clock's resolution")
    ratio = timing.ratio
    is_faster = ratio.high < FASTER
    return SchemeTrial(
        scheme=name,
        call_s=timing.call_s.value * scale,
        ratio=ratio.value,
        ratio_low=ratio.low,
        ratio_high=ratio.high,
        layer_error=error,
        why="faster" if is_faster else "not faster for certain" if ratio.low < 1 else "slower",
    )


def _front(trials: Sequence[SchemeTrial], faster: Mapping[str, Any]) -> list[str]:
    """Those that no other beats in both time and error."""
    there = [t for t in trials if t.scheme in faster]

    def key(t: SchemeTrial) -> tuple[float, float]:
        if t.call_s is None or t.layer_error is None:
            raise UsageError(f"scheme '{t.scheme}' was not measured")
        return t.call_s, t.layer_error

    return [
        t.scheme
        for t in there
        if not any(key(o)[0] <= key(t)[0] and key(o)[1] < key(t)[1] for o in there if o is not t)
    ]
