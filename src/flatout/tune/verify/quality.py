"""Whole runs compared by the user's own metric: is what is lost small enough, and how much sooner do they end?"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from statistics import median
from typing import Final, NamedTuple

import msgspec

from flatout.core.errors import UsageError
from flatout.core.records.allowance import Allowance
from flatout.core.records.record import Record
from flatout.core.records.verdict import FEWEST_PAIRS, Equality, Speed
from flatout.machine.measure.stats import median_estimate, ratio_estimate
from flatout.tune.verify.side_process import Failed, Request, SideProcess


class Metric(Record, frozen=True, kw_only=True):
    """What a script prints about its quality: a pattern with one group, whose last match in the output counts.

    A change may lose `allowed_loss` of it; less is better with `is_cost` (a loss, an error, a perplexity).
    """

    pattern: str
    allowed_loss: Allowance = Allowance()
    is_cost: bool = False

    def read(self, output: str) -> float | None:
        """The metric in what a run printed; None where it is not."""
        matches = [m for m in re.finditer(self.pattern, output) if m.group(1) is not None]
        try:
            return float(matches[-1].group(1)) if matches else None
        except ValueError:
            return None


def checked(metric: Metric) -> Metric:
    """The metric as it is, if it can be used.

    Raises UsageError when its pattern is none or has not one group.
    """
    try:
        groups = re.compile(metric.pattern).groups
    except re.error as e:
        raise UsageError(
            f"--metric '{metric.pattern}' is no regular expression: {e}; write 'accuracy ([0-9.]+)'"
        ) from e
    if groups != 1:
        raise UsageError(f"--metric '{metric.pattern}' has {groups} groups and needs one, as 'accuracy ([0-9.]+)' has")
    return metric


class WholeRun(NamedTuple):
    """One run to the end: its seconds, without the interpreter's start, and its metric."""

    seconds: float
    metric: float


class WholeRuns:
    """Runs of scripts to their end, each saved by script, plan and seed. Use a seed for one run of each side."""

    def __init__(self, metric: Metric, process: Callable[[Request], SideProcess], *, timeout_s: float) -> None:
        """Nothing runs yet; `process` starts a run when one is asked for."""
        self._metric = metric
        self._process = process
        self._timeout_s = timeout_s
        self._finished: dict[tuple[str, str, int], WholeRun] = {}

    def run(self, request: Request, seed: int) -> WholeRun:
        """The run of a request on a seed, started if there is none yet.

        Raises Failed when it does not end well or prints no metric.
        """
        key = (request.target, request.plan, seed)
        if key not in self._finished:
            wanted = msgspec.structs.replace(request, seed=seed, is_whole=True, folder="", num_recorded=0)
            with self._process(wanted) as process:
                answer = process.answer(timeout_s=self._timeout_s)
                printed = process.output()
            if answer.error:
                raise Failed(f"'{request.target}' ended with an error: {answer.error}")
            found = self._metric.read(printed)
            if found is None:
                last = " | ".join(printed.strip().splitlines()[-3:])
                raise Failed(f"'{self._metric.pattern}' is not in what '{request.target}' printed: {last[-300:]}")
            self._finished[key] = WholeRun(answer.seconds, found)
        return self._finished[key]

    def compare(self, base: Request, before: Request, after: Request, seeds: Sequence[int]) -> tuple[Equality, Speed]:
        """What `after` loses against the base, and how much sooner it ends than `before`, over these seeds.

        Raises Failed when a run does not end well.
        """
        losses, metrics, befores, afters = [], [], [], []
        for seed in seeds:
            untouched, one, two = (self.run(r, seed) for r in (base, before, after))
            gap = two.metric - untouched.metric
            losses.append(gap if self._metric.is_cost else -gap)
            metrics.append(untouched.metric)
            befores.append(one.seconds)
            afters.append(two.seconds)
        ratio = ratio_estimate(befores, afters)
        speed = Speed(
            ratio=ratio.value,
            low=ratio.low,
            high=ratio.high,
            num_pairs=len(seeds),
            before_s=median_estimate(befores).value,
            after_s=median_estimate(afters).value,
        )
        return self._judged(losses, self._metric.allowed_loss.of_metric(median(metrics))), speed

    def _judged(self, losses: Sequence[float], allowed: float) -> Equality:
        """The guarantee holds when the whole interval of the median loss is allowed, and fails when none of it is."""
        lost = median_estimate(list(losses))
        holds: bool | None = None
        if not all(map(math.isfinite, losses)):
            holds, because = False, "the metric is not finite"
        else:
            span = (
                f"it loses {lost.value:.4g} ({lost.low:.4g} to {lost.high:.4g}) of the metric, {allowed:.4g} is allowed"
            )
            holds = True if lost.high <= allowed else False if lost.low > allowed else None
            because = span if len(losses) >= FEWEST_PAIRS else f"{span}; too few runs for an interval"
            holds = holds if len(losses) >= FEWEST_PAIRS else None
        return Equality(guarantee="quality", holds=holds, num_steps=len(losses), because=because)


NUM_RUNS: Final = FEWEST_PAIRS
"""Seeds of a comparison: the fewest that have an interval."""
