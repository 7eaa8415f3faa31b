"""Each layer in each scheme, alone: how long its calls take beside the layer as it was, and how far its outputs move."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple, cast

import torch
from torch import nn

from flatout.core.errors import FlatoutError
from flatout.core.records.quantise import LayerOutcome, SchemeTrial
from flatout.machine.measure.timer import TimerClock, Timing, compare_times
from flatout.shrink.float64_reference import float64_outputs, relative_norm_error
from flatout.shrink.layer_calls import LayerCalls
from flatout.shrink.pareto import pareto_indices
from flatout.shrink.quantise.affine import Affine
from flatout.shrink.quantise.schemes import Scheme, refusal

FASTER: Final = 0.97
"""The upper end of a ratio's interval must lie below that: a layer alone is hotter in the cache than in its model."""
_PER_SCHEME_S: Final = 0.05
_MOST_S: Final = 1.0


class LayerTrials(NamedTuple):
    """A layer's trials, and the modules of those that are faster, by scheme."""

    layer: LayerOutcome
    layers: dict[str, nn.Module]

    def trial(self, scheme: str) -> SchemeTrial:
        """The trial of a scheme."""
        return next(t for t in self.layer.trials if t.scheme == scheme)


def try_layer(
    path: str,
    layer: nn.Module,
    calls: LayerCalls,
    schemes: Sequence[Scheme],
    *,
    input_ranges: Mapping[str, Affine],
    clock: TimerClock | None,
) -> LayerTrials:
    """Make the layer in all schemes, run its kept calls in interleaved rounds, and compare its first call with float64."""
    layers: dict[str, nn.Module] = {}
    errors: dict[str, float] = {}
    refused: dict[str, str] = {}
    exact = float64_outputs(layer, calls.first[0].args, calls.first[0].kwargs)
    with torch.inference_mode():
        for scheme in schemes:
            found = _converted(scheme, layer, input_ranges.get(path), calls)
            if isinstance(found, str):
                refused[scheme.name] = found
                continue
            layers[scheme.name] = found
            errors[scheme.name] = relative_norm_error(calls.first[0].run(found), exact)
        timings = _times(layer, layers, calls, clock)
    scale = calls.num / len(calls.first)
    trials = tuple(_trial(s.name, refused.get(s.name), timings.get(s.name), errors.get(s.name), scale) for s in schemes)
    faster = {t.scheme: layers[t.scheme] for t in trials if t.ratio_high is not None and t.ratio_high < FASTER}
    call_s = timings[""].call_s.value * scale if timings else None
    why = "nothing was faster" if layers else "no scheme takes it"
    outcome = LayerOutcome(
        path=path, kind=layer_kind(layer), num_calls=calls.num, call_s=call_s, trials=trials, why=why
    )
    return LayerTrials(outcome, {name: faster[name] for name in _pareto(trials, faster)})


def layer_kind(layer: nn.Module) -> str:
    """The type and the sizes of the first matrix.

    >>> layer_kind(nn.Linear(3, 5))
    'Linear 5x3'
    """
    first = next((p for name, p in layer.named_parameters() if "weight" in name), None)
    return type(layer).__name__ + ("" if first is None else " " + "x".join(map(str, first.shape)))


def _converted(scheme: Scheme, layer: nn.Module, input_ranges: Affine | None, calls: LayerCalls) -> nn.Module | str:
    """The layer in this scheme, after it has run once; or why not."""
    why = refusal(scheme, layer)
    if why is None and scheme.is_calibrated and input_ranges is None:
        why = "it needs calibrate= batches"
    if why is not None:
        return why
    try:
        found = scheme.make(layer, input_ranges).train(layer.training)
        calls.run(found)
    except (FlatoutError, RuntimeError, AssertionError, ValueError) as e:  # kernels of others refuse so
        return f"it does not run: {type(e).__name__}: {str(e).splitlines()[0][:160] if str(e) else ''}"
    return found


def _times(
    layer: nn.Module, layers: Mapping[str, nn.Module], calls: LayerCalls, clock: TimerClock | None
) -> dict[str, Timing]:
    if not layers:
        return {}
    modules = {"": layer, **layers}
    runs: dict[str, Callable[[], object]] = {name: partial(calls.run, module) for name, module in modules.items()}
    device = next(layer.parameters()).device
    return compare_times(
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


def _pareto(trials: Sequence[SchemeTrial], faster: Mapping[str, Any]) -> list[str]:
    """Those that no other beats in both time and error."""
    found = [trial for trial in trials if trial.scheme in faster]
    costs = [(cast(float, trial.call_s), cast(float, trial.layer_error)) for trial in found]
    return [found[i].scheme for i in pareto_indices(costs)]
