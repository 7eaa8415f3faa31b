"""Layers that get fewer bits, and their schemes: those that gain most time for what they cost, proved on the whole model.

First each layer is tried alone in each scheme, in time and in error. Each faster scheme is then put into the model by itself,
to see what the model loses by it. Layers are taken by gain over loss while their losses together fit into the budget. At the end
the whole model is measured, in loss and in time, and layers are reverted until it fits and is faster for certain.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec
import torch
from torch import Tensor, nn

from flatout.core.errors import FlatoutError, UsageError
from flatout.core.records.quantise import LayerOutcome, QuantisingReport, SchemeTrial
from flatout.core.tensors import nests as pytree
from flatout.core.units import duration
from flatout.machine.measure.stats import Estimate
from flatout.machine.measure.timer import TimerClock, compare_times
from flatout.shrink.float64_reference import float64_outputs, relative_norm_error
from flatout.shrink.layer_calls import layer_calls
from flatout.shrink.model_size import stored_bytes
from flatout.shrink.quantise.layer_trials import LayerTrials, layer_kind, try_layer
from flatout.shrink.quantise.observers import Kind, calibrated_inputs
from flatout.shrink.quantise.quantised_model import Quantised, read_by_parents, replaced
from flatout.shrink.quantise.schemes import LAYERS, default, refusal, scheme_of

_MODEL_S: Final = 0.5
_MODEL_MOST_S: Final = 10.0
_WORTH: Final = 0.95
"""The upper end of the whole model's ratio must lie below that: less is not worth an error, and may be gone in another place."""
_FREE: Final = 1e-3
"""Of the budget: losses below that are noise, and are ranked by time alone."""
_REFUSALS: Final = (FlatoutError, AttributeError, AssertionError, TypeError, ValueError, RuntimeError, LookupError)
"""What a model raises that looks at its layer's type, or reads what a float layer has and another has not."""

Metric = Callable[[nn.Module], float]


class QuantisationResult(NamedTuple):
    """The model with fewer bits, and how it came about. Nothing taken: its copy is the model as it was."""

    quantised: Quantised
    report: QuantisingReport

    @property
    def module(self) -> nn.Module:
        """The module to call in place of the model."""
        return self.quantised.module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.quantised.module(*args, **kwargs)

    def __str__(self) -> str:
        return report_table(self.report)


class _LayerOption(NamedTuple):
    """A layer in a scheme: seconds that a call of the model gets shorter, and what the model loses."""

    path: str
    scheme: str
    gain_s: float
    cost: float


def quantise_where_faster(
    model: nn.Module,
    inputs: Sequence[Any],
    *,
    metric: Metric | None = None,
    budget: float = 0.01,
    schemes: Sequence[str] | None = None,
    calibrate: Iterable[Any] | None = None,
    observer: Kind = "least-error",
    clock: TimerClock | None = None,
) -> QuantisationResult:
    """Measure every layer in every scheme on this machine at the shapes that `inputs`, the arguments of one call, bring about.

    `metric(model)`: higher is better; the result loses at most `budget` of it, in its own unit. It is called on a copy,
    once for each layer and scheme that is faster, and a few times more. Without a metric the budget is the outputs' error on
    `inputs`, relative, against float64. `schemes` None: those of flatout's own kernel and torch's; others by name. Threads are
    torch's.
    The result was measured twice at less than 0.95 of the model's time, with the whole interval, or nothing was taken.

    Raises UsageError for a model in training mode, and for one whose metric or output is not finite.
    """
    if model.training:
        raise UsageError("the model is in training mode; call eval() first: few-bit layers are for inference")
    if budget < 0:
        raise UsageError(f"budget {budget} is below 0; give what may be lost")
    tensor = next((t for t in (*model.parameters(), *pytree.tree_leaves(tuple(inputs))) if isinstance(t, Tensor)), None)
    device = torch.device("cpu") if tensor is None else tensor.device
    original = _Original(model, inputs, metric, device, clock)
    tried, left = _tried(original, schemes or default(device), calibrate, observer)
    priced, options = _priced(original, tried)
    taken = _taken(options, budget, added=metric is not None)
    quantised, cost, timing, backed_off = _proved(original, taken, priced, budget)
    report = QuantisingReport(
        device=str(device),
        num_threads=torch.get_num_threads(),
        torch=str(torch.__version__),
        measure="output error" if metric is None else "metric",
        budget=budget,
        cost=cost,
        cost_before=original.loss,
        **timing,
        weight_bytes_before=stored_bytes(model),
        weight_bytes_after=stored_bytes(quantised.module),
        layers=(*_outcomes(priced, quantised.schemes, dict(backed_off)), *left),
        backed_off=tuple(f"{path}: {why}" for path, why in backed_off),
    )
    return QuantisationResult(quantised, report)


class _Original:
    """The model as it was: what others lose against it, of its metric or in their outputs' error, and how long it takes."""

    def __init__(
        self,
        model: nn.Module,
        inputs: Sequence[Any],
        metric: Metric | None,
        device: torch.device,
        clock: TimerClock | None,
    ) -> None:
        self.model, self.inputs, self.clock = model, inputs, clock
        self._metric, self._device = metric, device
        if metric is None:
            self._exact = float64_outputs(model, inputs)
            self.loss = self.loss_of(model)
        else:
            self._at_first = float(metric(copy.deepcopy(model)))
            self.loss = 0.0 if math.isfinite(self._at_first) else math.nan
        if not math.isfinite(self.loss):
            raise UsageError(
                "the model's metric or output is NaN or infinite as it is; nothing can be compared with that"
            )

    def loss_of(self, model: nn.Module) -> float:
        """Infinite where it gives no number."""
        if self._metric is not None:
            fallen = self._at_first - float(self._metric(model))
            return fallen if math.isfinite(fallen) else math.inf
        with torch.inference_mode():
            return relative_norm_error(model(*self.inputs), self._exact)

    def times_of(self, model: nn.Module) -> dict[str, Any]:
        """Both models in interleaved rounds, as the report has it."""
        with torch.inference_mode():
            found = compare_times(
                {"before": lambda: self.model(*self.inputs), "after": lambda: model(*self.inputs)},
                device=self._device,
                min_time_s=_MODEL_S,
                max_time_s=_MODEL_MOST_S,
                clock=self.clock,
            )
        # Below the clock's resolution it is not faster.
        ratio = found["after"].ratio or Estimate(value=1.0, low=1.0, high=1.0, confidence=0.0, num_samples=0)
        return {
            "before_s": found["before"].call_s.value,
            "after_s": found["after"].call_s.value,
            "ratio": ratio.value,
            "ratio_low": ratio.low,
            "ratio_high": ratio.high,
            "num_rounds": ratio.num_samples,
        }


def _tried(
    original: _Original, names: Sequence[str], calibrate: Iterable[Any] | None, observer: Kind
) -> tuple[list[LayerTrials], list[LayerOutcome]]:
    """Layers that were tried, and those that could not be."""
    schemes, model = [scheme_of(name) for name in names], original.model
    layers = {path: layer for path, layer in model.named_modules() if isinstance(layer, LAYERS)}
    # Refusals first: a layer with a hook of ours would be refused for having one.
    stay = read_by_parents(model)
    why = {path: stay.get(path) for path in layers}
    for path, layer in layers.items():
        reasons = {scheme.name: refusal(scheme, layer) for scheme in schemes}
        if why[path] is None and all(reasons.values()):
            why[path] = "; ".join(dict.fromkeys(str(reason) for reason in reasons.values()))
    calls = layer_calls(model, [path for path in layers if why[path] is None], original.inputs)
    input_ranges = {}
    if calibrate is not None and any(s.is_calibrated for s in schemes):
        linear = [path for path in calls if isinstance(layers[path], nn.Linear)]
        input_ranges = calibrated_inputs(model, linear, calibrate, kind=observer)
    tried, left = [], []
    for path, layer in layers.items():
        if path in calls:
            tried.append(try_layer(path, layer, calls[path], schemes, input_ranges=input_ranges, clock=original.clock))
        else:
            message = why[path] or "it is not called on these inputs"
            left.append(LayerOutcome(path=path, kind=layer_kind(layer), num_calls=0, why=message))
    return tried, left


def _priced(original: _Original, tried: Sequence[LayerTrials]) -> tuple[list[LayerTrials], list[_LayerOption]]:
    """What the model loses by each faster scheme alone."""
    priced, options = [], []
    for one in tried:
        path, trials = one.layer.path, []
        for trial in one.layer.trials:
            layer = one.layers.get(trial.scheme)
            if layer is None or one.layer.call_s is None or trial.call_s is None:
                why = "faster, but another is faster and closer" if trial.why == "faster" else trial.why
                trials.append(msgspec.structs.replace(trial, why=why))
                continue
            wanted, layers = {path: scheme_of(trial.scheme)}, {(path, trial.scheme): layer}
            try:
                cost = original.loss_of(replaced(original.model, wanted, layers=layers).module)
            except _REFUSALS as e:
                why = f"the model does not run with it: {type(e).__name__}: {e}"
                trials.append(msgspec.structs.replace(trial, why=why))
                continue
            trials.append(msgspec.structs.replace(trial, cost=cost))
            options.append(_LayerOption(path, trial.scheme, one.layer.call_s - trial.call_s, cost))
        priced.append(LayerTrials(msgspec.structs.replace(one.layer, trials=tuple(trials)), one.layers))
    return priced, options


def _taken(options: Sequence[_LayerOption], budget: float, *, added: bool) -> dict[str, _LayerOption]:
    """Options taken by gain over loss while losses fit; then each layer's faster schemes where they still fit.

    Losses of a metric are added; errors of roundings that know nothing of one another, by their squares.
    """
    power = 1 if added else 2
    taken: dict[str, _LayerOption] = {}

    def fits(option: _LayerOption) -> bool:
        costs = [max(o.cost, 0.0) for o in {**taken, option.path: option}.values()]
        return sum(math.pow(c, power) for c in costs) <= math.pow(budget, power)

    def worth(option: _LayerOption) -> float:
        return option.gain_s / max(option.cost, budget * _FREE, 1e-30)

    for option in sorted(options, key=worth, reverse=True):
        if option.path not in taken and fits(option):
            taken[option.path] = option
    for option in sorted(options, key=lambda o: o.gain_s, reverse=True):
        if option.path in taken and option.gain_s > taken[option.path].gain_s and fits(option):
            taken[option.path] = option
    return taken


def _proved(
    original: _Original, taken: Mapping[str, _LayerOption], priced: Sequence[LayerTrials], budget: float
) -> tuple[Quantised, float, dict[str, Any], list[tuple[str, str]]]:
    """The whole model with what was taken; layers are reverted until it is inside the budget and faster."""
    left, reverted = dict(taken), list[tuple[str, str]]()
    layers = {(one.layer.path, name): module for one in priced for name, module in one.layers.items()}
    while left:
        wanted = {path: scheme_of(option.scheme) for path, option in left.items()}
        quantised = replaced(original.model, wanted, layers=layers)
        cost = original.loss_of(quantised.module)
        if cost > budget:
            worst = max(left.values(), key=lambda o: o.cost)
            why = f"the model loses {cost:.3g} with all that was taken, {budget:.3g} may be"
        else:
            timing = original.times_of(quantised.module)
            if timing["ratio_high"] < _WORTH:  # once more: a gain may have been a neighbour's noise
                timing = max(timing, original.times_of(quantised.module), key=lambda t: float(t["ratio_high"]))
            if timing["ratio_high"] < _WORTH:
                return quantised, cost, timing, reverted
            worst = min(left.values(), key=lambda o: o.gain_s)
            times = f"{timing['ratio']:.3f} of its time, at most {timing['ratio_high']:.3f}"
            why = f"the model is not faster for certain with all that was taken: {times}"
        reverted.append((worst.path, f"{worst.scheme}: {why}"))
        del left[worst.path]
    unchanged = Quantised(copy.deepcopy(original.model), {})
    timing = original.times_of(unchanged.module)
    alike = {"after_s": timing["before_s"], "ratio": 1.0, "ratio_low": 1.0, "ratio_high": 1.0}
    return unchanged, original.loss, {**timing, **alike}, reverted


def _outcomes(
    priced: Sequence[LayerTrials], schemes: Mapping[str, str], reverted: Mapping[str, str]
) -> list[LayerOutcome]:
    """Each tried layer with what became of it."""
    found = []
    for one in priced:
        layer, scheme = one.layer, schemes.get(one.layer.path)
        if scheme is not None:
            trial = one.trial(scheme)
            why = f"{trial.ratio:.2f} of its time; alone it costs {trial.cost:.2g}"
        elif layer.path in reverted:
            why = f"reverted: {reverted[layer.path]}"
        elif one.layers and all(one.trial(name).cost is None for name in one.layers):
            why = "faster, but the model does not run with it"
        elif one.layers:
            why = "faster, but its loss does not fit into the budget"
        else:
            why = layer.why
        found.append(msgspec.structs.replace(layer, scheme=scheme, why=why))
    return found


def report_table(report: QuantisingReport) -> str:
    """What the whole model gained and paid, then each layer with each scheme that was tried on it."""
    times = f"{duration(report.before_s)} -> {duration(report.after_s)}"
    ratio = (
        f"{report.ratio:.3f} [{report.ratio_low:.3f}, {report.ratio_high:.3f}] of the time, {report.num_rounds} rounds"
    )
    lines = [
        f"whole model: {times}, {ratio}; {report.device}, {report.num_threads} threads, torch {report.torch}",
        f"{report.measure}: lost {report.cost:.3g} (before {report.cost_before:.2g}), {report.budget:.3g} may be; "
        f"weights {report.weight_bytes_before / 2**20:.2f} -> {report.weight_bytes_after / 2**20:.2f} MiB",
        "",
    ]
    rows: list[tuple[str, ...]] = [("layer", "scheme", "time", "of before", "layer error", "model loses", "")]
    for layer in report.layers:
        rows += [_head(layer), *(_row(layer, trial) for trial in layer.trials)]
    lines += _aligned(rows)
    lines += [f"reverted: {message}" for message in report.backed_off]
    return "\n".join(lines)


def _head(layer: LayerOutcome) -> tuple[str, ...]:
    name = f"{layer.path or '(model)'}: {layer.kind}" + (f" x{layer.num_calls}" if layer.num_calls > 1 else "")
    return name, layer.scheme or "as it was", duration(layer.call_s), "", "", "", layer.why


def _row(layer: LayerOutcome, trial: SchemeTrial) -> tuple[str, ...]:
    ratio = "" if trial.ratio is None else f"{trial.ratio:.2f} [{trial.ratio_low:.2f}, {trial.ratio_high:.2f}]"
    error = "" if trial.layer_error is None else f"{trial.layer_error:.2g}"
    cost = "" if trial.cost is None else f"{trial.cost:.2g}"
    why = "taken" if trial.scheme == layer.scheme else trial.why
    return "", trial.scheme, duration(trial.call_s), ratio, error, cost, why


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
