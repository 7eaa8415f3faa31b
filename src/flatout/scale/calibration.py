"""Constants of a machine from few measured steps, and what the formulas miss where steps of like layers were measured.

The constants are fitted to the logarithm of the measured seconds by least squares (Levenberg, 1944; Marquardt, 1963), held near
their usual values as far as the measurements do not say otherwise. What is left is the same for layers of the same local shape (a
library's choice of kernels, say): it is interpolated between measured shapes (kriging; Rasmussen and Williams, Gaussian Processes
for Machine Learning, 2006, chapter 2), and widens the interval where no like shape was measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import exp, log, sqrt
from statistics import median, stdev
from typing import Final, NamedTuple

from msgspec import structs

from flatout.core import units
from flatout.core.errors import PlanError
from flatout.core.records.scale import Cluster, Constants, Layout, ModelShape, Software
from flatout.machine.specs.catalog import load_spec
from flatout.scale.step import step_time

_FIXED: Final = frozenset({"straggler_share"})
"""Constants that steps of one cluster cannot separate from the others."""
_USUAL_SPREAD: Final = 0.7
"""How far constants lie from their defaults: a factor of two; shares as much in their odds."""
_SPREADS: Final = {"kernel_s": 0.3, "step_s": 0.1}
"""The same of constants that differ less: a kernel's start is a few microseconds on every device, and what a step takes once,
besides what it takes for each layer, a millisecond or two. Left to themselves they become several times as much where the host is
slow, and the host's operators too little: then predictions of more layers than were measured are too fast."""
_OF_TINY_LAYER: Final = {"operator_s": 1 / 43, "divided_operator_s": 1 / 8.6, "collective_s": 1 / 63}
"""Constants of the host over what it takes for the forward and backward of a tiny layer, which is measured between steps: as they
were fitted on two H200 (bench/results/2026-11-29-h200-x2, layouts_few_layers)."""
_SPREAD_OF_TINY: Final = 0.25
"""How far they lie from that."""
_HOST_POWER: Final = 0.6
"""Steps of host-bound layouts go with that power of the tiny layer's time, which is measured for a few milliseconds. In that file
the logarithms of both between two rounds of 16 layouts correlate with 0.7, of a loop over one small operator with 0.5."""
_NOISE: Final = 0.03
"""Of a measured step, and of formulas, as they count when constants are fitted."""
_BEYOND: Final = 1.2
"""Times as wide an interval is beyond the tiers that were measured: as far as predictions of many nodes were off where nothing
was fitted (bench/planner.py, dense models)."""
_ROUNDS: Final = 12
_UNMOVED: Final = 0.01
"""A constant that moved by less is not named among those that were fitted."""
_STEP: Final = 1e-4
_SCALES: Final = (0.25, 0.5, 1.0, 2.0)
_AMPLITUDES: Final = (0.02, 0.05, 0.1, 0.2)
_REST: Final = (0.005, 0.01, 0.02, 0.04)
_COVERED: Final = 0.95
_WIDE: Final = 1.65
"""Deviations of a normal law on either side that hold nine of ten."""

Row = Sequence[float]


class TimedLayout(NamedTuple):
    """A step of a layout that was measured; `host_layer_s` is what the host took for a tiny layer then, where that is
    known."""

    model: ModelShape
    layout: Layout
    seconds: float
    host_layer_s: float | None = None


class Predicted(NamedTuple):
    """Seconds of a step, and the interval that holds them in nine of ten cases or more."""

    seconds: float
    low_s: float
    high_s: float


class Calibrated:
    """Constants that fit measured steps, and the predictions made with them."""

    def __init__(
        self, runs: Sequence[TimedLayout], cluster: Cluster, software: Software, prior: Constants | None = None
    ) -> None:
        """Fit the constants; raises PlanError where nothing was measured."""
        if not runs:
            raise PlanError("there is no measured step; measure some layouts first")
        self._cluster, self._software = cluster, software
        self._most = max(run.layout.num_devices for run in runs)
        prior = prior or Constants()
        speeds = [run.host_layer_s for run in runs if run.host_layer_s is not None]
        self._host_layer_s = median(speeds) if speeds else None
        self._slow_host_s = (self._host_layer_s or 0.0) * exp(_WIDE * _deviation([log(s) for s in speeds]))
        is_known = self._host_layer_s is not None and load_spec(cluster.device).kind == "gpu"
        start = _with_host(prior, self._host_layer_s) if is_known else prior
        self.constants = _fitted(runs, cluster, software, start, self._host_layer_s, is_host_known=is_known)
        self.fitted = tuple(_in_words(self.constants, prior))
        """Each constant that the measured steps moved, in words."""
        self._points = [_local_shape(run.model, run.layout) for run in runs]
        left = [log(run.seconds / self._formula_s(run.model, run.layout, run.host_layer_s)) for run in runs]
        self._krige = _best_krige(self._points, left)
        self._wide = _width(self._krige)

    def predict(self, model: ModelShape, layout: Layout, *, host_layer_s: float | None = None) -> Predicted:
        """Seconds of a step: where `host_layer_s` says what the host takes for a tiny layer, on a host as fast as that;
        else on one as fast as in the median of the measured steps.

        Raises PlanError where the layout does not fit the model.
        """
        mean, deviation = self._krige.at(_local_shape(model, layout))
        seconds = self._formula_s(model, layout, host_layer_s) * exp(mean)
        factor = exp(self._wide * deviation) * self._further(layout)
        if host_layer_s is None and self._host_layer_s is not None:  # it may be as fast, or as slow, as it was at times
            now_s = self._formula_s(model, layout, self._host_layer_s)
            factor *= self._formula_s(model, layout, self._slow_host_s) / now_s
        return Predicted(seconds, seconds / factor, seconds * factor)

    def _further(self, layout: Layout) -> float:
        """How much wider the interval is of a layout that goes beyond the tiers that measured steps used: their share of the
        bandwidth is then as usual, not fitted."""
        reaches = [tier.reach for tier in self._cluster.tiers]
        used, needed = (sum(reach < devices for reach in reaches) for devices in (self._most, layout.num_devices))
        return _BEYOND if needed > used else 1.0

    def _formula_s(self, model: ModelShape, layout: Layout, host_layer_s: float | None) -> float:
        constants = _on_host(self.constants, host_layer_s, self._host_layer_s)
        return step_time(model, layout, self._cluster, self._software, constants).total_s


def _deviation(values: Sequence[float]) -> float:
    """Their standard deviation; 0 of fewer than two."""
    return stdev(values) if len(values) > 1 else 0.0


def _with_host(prior: Constants, host_layer_s: float | None) -> Constants:
    """The prior with the host's constants as they usually are where it takes so long for a tiny layer."""
    if host_layer_s is None:
        return prior
    return structs.replace(prior, **{name: times * host_layer_s for name, times in _OF_TINY_LAYER.items()})


def _on_host(constants: Constants, host_layer_s: float | None, usual_s: float | None) -> Constants:
    """The constants on a host that takes so long for a tiny layer, where they are those of one that takes `usual_s`."""
    if host_layer_s is None or usual_s is None or host_layer_s == usual_s:
        return constants
    times = (host_layer_s / usual_s) ** _HOST_POWER
    return structs.replace(constants, **{name: times * getattr(constants, name) for name in _OF_TINY_LAYER})


def _in_words(constants: Constants, prior: Constants) -> Iterator[str]:
    """Constants that differ from the prior's, under their names."""
    for field in structs.fields(Constants):
        value, before = getattr(constants, field.name), getattr(prior, field.name)
        if abs(value / before - 1) > _UNMOVED if before else value:
            name, kind = field.name.rsplit("_", 1)
            words = name.replace("_", " ")
            if kind == "share":
                yield f"{words} share {units.percent(value)}"
            elif kind == "s":
                yield f"{words} {units.duration(value)}"
            else:
                yield f"{words} {kind} {value:.3g}"


def _local_shape(model: ModelShape, layout: Layout) -> Row:
    """The share of a layer that one device has, by powers of two."""
    sizes = (layout.micro_batch * model.seq, model.hidden, layout.tensor)
    return tuple(log(size) / log(2) for size in sizes)


# -- constants ------------------------------------------------------------------------------------------------------------


def _fitted(
    runs: Sequence[TimedLayout],
    cluster: Cluster,
    software: Software,
    prior: Constants,
    usual_s: float | None,
    *,
    is_host_known: bool,
) -> Constants:
    spreads_of = _SPREADS | (dict.fromkeys(_OF_TINY_LAYER, _SPREAD_OF_TINY) if is_host_known else {})
    names = _measured_constants(runs, cluster, software, prior)
    start = [_unbounded(name, getattr(prior, name)) for name in names]

    def constants(places: Row) -> Constants:
        found = {name: _bounded(name, place) for name, place in zip(names, places, strict=True)}
        return structs.replace(prior, **found)

    def misses(places: Row) -> list[float]:
        constants_now = constants(places)
        taken_s = (
            step_time(
                run.model, run.layout, cluster, software, _on_host(constants_now, run.host_layer_s, usual_s)
            ).total_s
            for run in runs
        )
        residuals = [log(s / run.seconds) / _NOISE for run, s in zip(runs, taken_s, strict=True)]
        spreads = (spreads_of.get(name, _USUAL_SPREAD) for name in names)
        moves = ((a - b) / spread for a, b, spread in zip(places, start, spreads, strict=True))
        return [*map(_robust, residuals), *moves]

    return constants(_least_squares(misses, start))


def _measured_constants(
    runs: Sequence[TimedLayout], cluster: Cluster, software: Software, prior: Constants
) -> list[str]:
    """The constants that some measured step depends on; the others stay as they are."""

    def seconds(constants_now: Constants) -> list[float]:
        return [step_time(run.model, run.layout, cluster, software, constants_now).total_s for run in runs]

    usual = seconds(prior)
    names = [field.name for field in structs.fields(Constants) if field.name not in _FIXED]
    moved = {name: _bounded(name, _unbounded(name, getattr(prior, name)) + _USUAL_SPREAD) for name in names}
    return [name for name in names if seconds(structs.replace(prior, **{name: moved[name]})) != usual]


def _unbounded(name: str, value: float) -> float:
    """Where a constant lies on the whole line: its logarithm, for a share, which stays below 1, that of the odds."""
    return log(value / (1 - value)) if name.endswith("_share") else log(value)


def _bounded(name: str, place: float) -> float:
    return 1 / (1 + exp(-place)) if name.endswith("_share") else exp(place)


def _robust(miss: float) -> float:
    """The root of Huber's loss: a miss beyond two counts as its size and no longer as its square."""
    return miss if abs(miss) <= 2 else (4 * abs(miss) - 4) ** 0.5 * (1 if miss > 0 else -1)


def _least_squares(misses: Callable[[Row], list[float]], start: Row) -> Row:
    """Levenberg-Marquardt with differences for derivatives."""
    now, damping = list(start), 1e-2
    residuals = misses(now)
    loss = sum(x * x for x in residuals)
    for _ in range(_ROUNDS):
        columns = []
        for index in range(len(now)):
            moved = list(now)
            moved[index] += _STEP
            columns.append([(b - a) / _STEP for a, b in zip(residuals, misses(moved), strict=True)])
        normal = [[sum(x * y for x, y in zip(a, b, strict=True)) for b in columns] for a in columns]
        slope = [sum(x * y for x, y in zip(a, residuals, strict=True)) for a in columns]
        gained = 0.0
        for _ in range(6):
            damped = [[v * (1 + damping * (i == j)) for j, v in enumerate(row)] for i, row in enumerate(normal)]
            move = _solved(_cholesky(damped), slope)
            trial = [x - max(-1.0, min(1.0, d)) for x, d in zip(now, move, strict=True)]
            tried = misses(trial)
            tried_loss = sum(x * x for x in tried)
            if tried_loss < loss:
                gained = 1 - tried_loss / loss
                now, residuals, loss, damping = trial, tried, tried_loss, damping / 5
                break
            damping *= 5
        if gained < 1e-4:
            break
    return now


# -- what is left ---------------------------------------------------------------------------------------------------------


class _Krige:
    """A Gaussian process through points: amplitude and length of what they share, and what each has of its own."""

    def __init__(self, points: Sequence[Row], values: Row, amplitude: float, scale: float, rest: float) -> None:
        self._points, self._amplitude, self._scale, self.rest = points, amplitude, scale, rest
        matrix = [
            [self._shared(a, b) + (rest * rest if i == j else 0.0) for j, b in enumerate(points)]
            for i, a in enumerate(points)
        ]
        self._root = _cholesky(matrix)
        self._values = list(values)
        self._weights = _solved(self._root, values)
        self.likelihood = -0.5 * sum(v * w for v, w in zip(values, self._weights, strict=True)) - sum(
            log(self._root[i][i]) for i in range(len(points))
        )

    def at(self, point: Row) -> tuple[float, float]:
        """Mean and standard deviation at a point."""
        near = [self._shared(point, p) for p in self._points]
        mean = sum(k * w for k, w in zip(near, self._weights, strict=True))
        known = sum(k * s for k, s in zip(near, _solved(self._root, near), strict=True))
        return mean, sqrt(max(0.0, self._amplitude**2 - known) + self.rest**2)

    def left_out(self) -> list[float]:
        """How far each point lies from what the others predict, in deviations (Rasmussen and Williams, 5.4.2)."""
        size = len(self._points)
        found = []
        for i in range(size):
            unit = [1.0 if j == i else 0.0 for j in range(size)]
            inverse = _solved(self._root, unit)[i]
            found.append(abs(self._weights[i]) / sqrt(inverse))
        return found

    def _shared(self, a: Row, b: Row) -> float:
        distance = sum((x - y) ** 2 for x, y in zip(a, b, strict=True))
        return self._amplitude**2 * exp(-0.5 * distance / self._scale**2)


def _best_krige(points: Sequence[Row], values: Row) -> _Krige:
    tries = [_Krige(points, values, a, s, r) for a in _AMPLITUDES for s in _SCALES for r in _REST]
    return max(tries, key=lambda krige: krige.likelihood)


def _width(krige: _Krige) -> float:
    """Deviations that hold as many of the points that were left out as intervals are to hold; a normal law's at least."""
    found = sorted(krige.left_out())
    return max(_WIDE, found[min(len(found) - 1, int(_COVERED * len(found)))])


def _cholesky(matrix: Sequence[Row]) -> list[list[float]]:
    size = len(matrix)
    root = [[0.0] * size for _ in range(size)]
    for i in range(size):
        row = root[i]
        for j in range(i + 1):
            other = root[j]
            rest = matrix[i][j] - sum(row[k] * other[k] for k in range(j))
            row[j] = sqrt(max(rest, 1e-300)) if i == j else rest / other[j]
    return root


def _solved(root: Sequence[Row], values: Row) -> list[float]:
    size = len(values)
    half = [0.0] * size
    for i in range(size):
        row = root[i]
        half[i] = (values[i] - sum(row[k] * half[k] for k in range(i))) / row[i]
    whole = [0.0] * size
    for i in reversed(range(size)):
        whole[i] = (half[i] - sum(root[k][i] * whole[k] for k in range(i + 1, size))) / root[i][i]
    return whole
