"""Which layers get fewer bits, and in which scheme: those that gain most time for what they cost, proved on the whole model.

First each layer is tried alone in each scheme, in time and in error. Each faster scheme is then put into the model by itself,
to see what the model loses by it. Layers are taken by gain over loss while their losses together fit into the budget. At the end
the whole model is measured, in loss and in time, and layers are given back until it fits and is faster for certain.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from flatout.compression.quantising.calls import calls_of, distance, in_float64, recorded
from flatout.compression.quantising.observers import Kind
from flatout.compression.quantising.quantised import Quantised, num_bytes, replaced
from flatout.compression.quantising.schemes import LAYERS, default, refusal, scheme_of
from flatout.compression.quantising.sites import parents, read_by_parent
from flatout.compression.quantising.table import table
from flatout.compression.quantising.trying import Tried, kind_of, try_layer
from flatout.errors import FlatoutError, UsageError
from flatout.measure.stats import Estimate
from flatout.measure.timer import Clock, Timing, compare
from flatout.records.quantising import LayerChoice, QuantisingReport

_MODEL_S: Final = 0.5
_MODEL_MOST_S: Final = 10.0
_WORTH: Final = 0.95
"""The upper end of the whole model's ratio must lie below that: less is not worth an error, and may be gone in another place."""
_FREE: Final = 1e-3
"""Of the budget: losses below that are noise, and are ranked by time alone."""
_REFUSALS: Final = (FlatoutError, AttributeError, AssertionError, TypeError, ValueError, RuntimeError, LookupError)
"""What a model raises that looks at its layer's type, or reads what a float layer has and another has not."""

Metric = Callable[[nn.Module], float]


class Chosen(NamedTuple):
    """The model with fewer bits, and how it came about. Nothing taken: its copy is the model as it was."""

    quantised: Quantised
    report: QuantisingReport

    @property
    def module(self) -> nn.Module:
        """To be called in place of the model."""
        return self.quantised.module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.quantised.module(*args, **kwargs)

    def __str__(self) -> str:
        return table(self.report)


class _Offer(NamedTuple):
    """A layer in a scheme: seconds that a call of the model gets shorter, and what the model loses."""

    path: str
    scheme: str
    gain_s: float
    cost: float


def choose(
    model: nn.Module,
    inputs: Sequence[Any],
    *,
    metric: Metric | None = None,
    budget: float = 0.01,
    schemes: Sequence[str] | None = None,
    calibrate: Iterable[Any] | None = None,
    observer: Kind = "least-error",
    clock: Clock | None = None,
) -> Chosen:
    """Measure every layer in every scheme on this machine at the shapes that `inputs`, the arguments of one call, bring about.

    `metric(model)`: higher is better; the chosen model loses at most `budget` of it, in its own unit. It is called on a copy,
    once for each layer and scheme that is faster, and a few times more. Without a metric the budget is the outputs' error on
    `inputs`, relative, against float64. `schemes` None: those of flatout's own kernel and torch's; others by name. Threads are
    torch's.
    The chosen model was measured twice at less than 0.95 of the model's time, with the whole interval, or nothing was taken.

    Raises UsageError for a model in training mode, and for one whose metric or output is not finite.
    """
    if model.training:
        raise UsageError("the model is in training mode; call eval() first: few-bit layers are for inference")
    if budget < 0:
        raise UsageError(f"budget {budget} is below 0; give what may be lost")
    tensor = next((t for t in (*model.parameters(), *pytree.tree_leaves(tuple(inputs))) if isinstance(t, Tensor)), None)
    device = torch.device("cpu") if tensor is None else tensor.device
    loss = _Loss(model, inputs, metric)
    tried, left = _tried(model, inputs, schemes or default(device), calibrate, observer, clock)
    priced, offers = _priced(model, tried, loss)
    final = _proved(
        model, inputs, _taken(offers, budget, added=metric is not None), priced, loss, budget, device, clock
    )
    quantised, cost, timing, backed_off = final
    report = QuantisingReport(
        device=str(device),
        num_threads=torch.get_num_threads(),
        torch=str(torch.__version__),
        measure="output error" if metric is None else "metric",
        budget=budget,
        cost=cost,
        cost_before=loss.before,
        **timing,
        weight_bytes_before=num_bytes(model),
        weight_bytes_after=num_bytes(quantised.module),
        layers=(*_told(priced, quantised.schemes, dict(backed_off)), *left),
        backed_off=tuple(f"{path}: {why}" for path, why in backed_off),
    )
    return Chosen(quantised, report)


class _Loss:
    """What a model loses against the one given: of its metric, or in its outputs' error against float64."""

    def __init__(self, model: nn.Module, inputs: Sequence[Any], metric: Metric | None) -> None:
        self._inputs, self._metric = inputs, metric
        if metric is None:
            self._exact = in_float64(model, inputs, {})
            self.before = self.of(model)
        else:
            self._at_first = float(metric(copy.deepcopy(model)))
            self.before = 0.0 if math.isfinite(self._at_first) else math.nan
        if not math.isfinite(self.before):
            raise UsageError(
                "the model's metric or output is NaN or infinite as it is; nothing can be compared with that"
            )

    def of(self, model: nn.Module) -> float:
        """Infinite where it gives no number."""
        if self._metric is not None:
            fallen = self._at_first - float(self._metric(model))
            return fallen if math.isfinite(fallen) else math.inf
        with torch.inference_mode():
            return distance(model(*self._inputs), self._exact)


def _tried(
    model: nn.Module,
    inputs: Sequence[Any],
    names: Sequence[str],
    calibrate: Iterable[Any] | None,
    observer: Kind,
    clock: Clock | None,
) -> tuple[list[Tried], list[LayerChoice]]:
    """Layers that were tried, and those that could not be."""
    schemes = [scheme_of(name) for name in names]
    inside = parents(model)
    layers = {path: layer for path, layer in model.named_modules() if isinstance(layer, LAYERS)}
    # Refusals first: a layer with a hook of ours would be refused for having one.
    why = {path: read_by_parent(path, inside) for path in layers}
    for path, layer in layers.items():
        reasons = {scheme.name: refusal(scheme, layer) for scheme in schemes}
        if why[path] is None and all(reasons.values()):
            why[path] = "; ".join(dict.fromkeys(str(reason) for reason in reasons.values()))
    calls = calls_of(model, [path for path in layers if why[path] is None], inputs)
    seen = {}
    if calibrate is not None and any(s.is_calibrated for s in schemes):
        linear = [path for path in calls if isinstance(layers[path], nn.Linear)]
        seen = recorded(model, linear, calibrate, kind=observer)
    tried, left = [], []
    for path, layer in layers.items():
        if path in calls:
            tried.append(try_layer(path, layer, calls[path], schemes, seen=seen, clock=clock))
        else:
            told = why[path] or "it is not called on these inputs"
            left.append(LayerChoice(path=path, kind=kind_of(layer), num_calls=0, why=told))
    return tried, left


def _priced(model: nn.Module, tried: Sequence[Tried], loss: _Loss) -> tuple[list[Tried], list[_Offer]]:
    """What the model loses by each faster scheme alone."""
    priced, offers = [], []
    for one in tried:
        path, call_s = one.layer.path, one.layer.call_s
        trials = []
        for trial in one.layer.trials:
            if trial.scheme not in one.made or call_s is None or trial.call_s is None:
                beaten = trial.why == "faster"
                trials.append(
                    msgspec.structs.replace(trial, why="faster, but another is faster and closer") if beaten else trial
                )
                continue
            try:
                alone = replaced(
                    model, {path: scheme_of(trial.scheme)}, made={(path, trial.scheme): one.made[trial.scheme]}
                )
                cost = loss.of(alone.module)
            except _REFUSALS as e:
                told = f"the model does not run with it: {type(e).__name__}: {e}"
                trials.append(msgspec.structs.replace(trial, why=told))
                continue
            trials.append(msgspec.structs.replace(trial, cost=cost))
            offers.append(_Offer(path, trial.scheme, call_s - trial.call_s, cost))
        priced.append(Tried(msgspec.structs.replace(one.layer, trials=tuple(trials)), one.made))
    return priced, offers


def _taken(offers: Sequence[_Offer], budget: float, *, added: bool) -> dict[str, _Offer]:
    """By gain over loss while losses fit; then each layer's faster schemes where they still fit.

    Losses of a metric are added; errors of roundings that know nothing of one another, by their squares.
    """
    power = 1 if added else 2
    taken: dict[str, _Offer] = {}

    def fits(offer: _Offer) -> bool:
        costs = [max(o.cost, 0.0) for o in {**taken, offer.path: offer}.values()]
        return sum(math.pow(c, power) for c in costs) <= math.pow(budget, power)

    def worth(offer: _Offer) -> float:
        return offer.gain_s / max(offer.cost, budget * _FREE, 1e-30)

    for offer in sorted(offers, key=worth, reverse=True):
        if offer.path not in taken and fits(offer):
            taken[offer.path] = offer
    for offer in sorted(offers, key=lambda o: o.gain_s, reverse=True):
        if offer.path in taken and offer.gain_s > taken[offer.path].gain_s and fits(offer):
            taken[offer.path] = offer
    return taken


def _proved(
    model: nn.Module,
    inputs: Sequence[Any],
    taken: Mapping[str, _Offer],
    priced: Sequence[Tried],
    loss: _Loss,
    budget: float,
    device: torch.device,
    clock: Clock | None,
) -> tuple[Quantised, float, dict[str, Any], list[tuple[str, str]]]:
    """The whole model with what was taken; layers are given back until it is inside the budget and faster."""
    left, given_back = dict(taken), []
    made = {(one.layer.path, name): module for one in priced for name, module in one.made.items()}
    while left:
        wanted = {path: scheme_of(offer.scheme) for path, offer in left.items()}
        quantised = replaced(model, wanted, made=made)
        cost = loss.of(quantised.module)
        if cost > budget:
            worst = max(left.values(), key=lambda o: o.cost)
            given_back.append(
                (worst.path, f"{worst.scheme}: the model loses {cost:.3g} with all that was taken, {budget:.3g} may be")
            )
        else:
            timing = _times(model, quantised.module, inputs, device, clock)
            if timing["ratio_high"] < _WORTH:  # once more: a gain may have been a neighbour's noise
                timing = max(
                    timing, _times(model, quantised.module, inputs, device, clock), key=lambda t: float(t["ratio_high"])
                )
            if timing["ratio_high"] < _WORTH:
                return quantised, cost, timing, given_back
            worst = min(left.values(), key=lambda o: o.gain_s)
            told = f"{timing['ratio']:.3f} of its time, at most {timing['ratio_high']:.3f}"
            given_back.append(
                (worst.path, f"{worst.scheme}: the model is not faster for certain with all that was taken: {told}")
            )
        del left[worst.path]
    unchanged = Quantised(copy.deepcopy(model), {}, floats={}, left={})
    timing = _times(model, unchanged.module, inputs, device, clock)
    alike = {"after_s": timing["before_s"], "ratio": 1.0, "ratio_low": 1.0, "ratio_high": 1.0}
    return unchanged, loss.before, {**timing, **alike}, given_back


def _times(
    before: nn.Module, after: nn.Module, inputs: Sequence[Any], device: torch.device, clock: Clock | None
) -> dict[str, Any]:
    """Both models in interleaved rounds, as the report has it."""
    with torch.inference_mode():
        runs: dict[str, Callable[[], object]] = {"before": lambda: before(*inputs), "after": lambda: after(*inputs)}
        found: dict[str, Timing] = compare(
            runs, device=device, min_time_s=_MODEL_S, max_time_s=_MODEL_MOST_S, clock=clock
        )
    one = Estimate(
        value=1.0, low=1.0, high=1.0, confidence=0.0, num_samples=0
    )  # below the clock's resolution: not faster
    ratio = found["after"].ratio or one
    return {
        "before_s": found["before"].call_s.value,
        "after_s": found["after"].call_s.value,
        "ratio": ratio.value,
        "ratio_low": ratio.low,
        "ratio_high": ratio.high,
        "num_rounds": ratio.num_samples,
    }


def _told(priced: Sequence[Tried], schemes: Mapping[str, str], given_back: Mapping[str, str]) -> list[LayerChoice]:
    """Each tried layer with what became of it."""
    found = []
    for one in priced:
        layer, scheme = one.layer, schemes.get(one.layer.path)
        if scheme is not None:
            trial = one.trial(scheme)
            why = f"{trial.ratio:.2f} of its time; alone it costs {trial.cost:.2g}"
        elif layer.path in given_back:
            why = f"given back: {given_back[layer.path]}"
        elif one.made and all(one.trial(name).cost is None for name in one.made):
            why = "faster, but the model does not run with it"
        elif one.made:
            why = "faster, but its loss does not fit into the budget"
        else:
            why = layer.why
        found.append(msgspec.structs.replace(layer, scheme=scheme, why=why))
    return found
