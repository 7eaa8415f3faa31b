"""What failures leave of a run's time: in closed form, and by simulation.

Interruptions come as a Poisson process, also during a restart, which then begins anew. A stretch of work and its checkpoint must
get through in one piece, so that the expected time for it is M e^(R / M) (e^((w + d) / M) - 1), with M the mean time between
interruptions, R what a restart takes, w the work and d the stall (Daly, A higher order estimate of the optimum checkpoint
interval for restart dumps, 2006, equation 20). The best interval is its minimum; for d much smaller than M it is Young's
sqrt(2 d M) (1974). A checkpoint that is still on its way counts only when it has arrived: an interruption before that loses a
stretch more, in the mean as much work as the way takes, which is added to R.
"""

from __future__ import annotations

from math import exp, expm1, sqrt
from random import Random
from typing import Final

from flatout.core.errors import PlanError
from flatout.core.records.failure import Failures, Goodput, Recovery

_GOLDEN: Final = (sqrt(5) - 1) / 2
_LARGEST_EXPONENT: Final = 500.0


def expected_goodput(failures: Failures, recovery: Recovery) -> Goodput:
    """The goodput in closed form, with the best interval where none is named.

    >>> many = Failures(num_nodes=16384, per_thousand_node_days=6.5)  # 131072 GPUs, an interruption every 13.5 minutes
    >>> [round(expected_goodput(many, Recovery(stall_s=d, restart_s=r)).goodput, 2) for d, r in ((60, 600), (5, 60), (0.5, 10))]
    [0.32, 0.83, 0.95]
    """
    mean_s = failures.mtbf_s
    work_s = _interval_s(failures, recovery)
    whole_s = _stretch_s(mean_s, recovery, work_s)
    # a stretch fails e^((w + d) / M) - 1 times, and each time a restart takes M (e^(D / M) - 1) with those that fail themselves
    num = expm1((work_s + recovery.stall_s) / mean_s)
    down = num * mean_s * expm1((recovery.detect_s + recovery.restart_s) / mean_s) / whole_s
    goodput, saving = work_s / whole_s, recovery.stall_s / whole_s
    return Goodput(
        goodput=goodput,
        saving=saving,
        lost=max(0.0, 1 - goodput - saving - down),
        down=down,
        interval_s=work_s,
        mtbf_s=mean_s,
    )


def best_interval_s(failures: Failures, recovery: Recovery) -> float:
    """Seconds of work between checkpoints that leave the most of the time, by golden section around Young's."""
    mean_s = failures.mtbf_s
    young_s = sqrt(2 * max(recovery.stall_s, 1e-3) * mean_s)

    def loss(work_s: float) -> float:
        return _stretch_s(mean_s, recovery, work_s) / work_s

    low, high = max(0.02 * young_s, recovery.write_s), max(10 * young_s, 2 * recovery.write_s)
    while high - low > 1e-4 * young_s:
        left, right = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
        low, high = (low, right) if loss(left) < loss(right) else (left, high)
    return (low + high) / 2


def interruptions(failures: Failures, days: float) -> tuple[float, float]:
    """Mean and two deviations of how many interruptions there are in so many days.

    >>> llama3 = Failures(num_nodes=2048, per_thousand_node_days=3.8)
    >>> [round(x) for x in interruptions(llama3, 54)]
    [420, 41]
    """
    mean = days * 86400 / failures.mtbf_s
    return mean, 2 * sqrt(mean)


def simulated_goodput(
    failures: Failures, recovery: Recovery, *, num_interruptions: int = 40000, seed: int = 0
) -> Goodput:
    """The goodput by simulation: stretches of work, one after the other, until so many interruptions have come."""
    rng, mean_s = Random(seed), failures.mtbf_s
    work_s = _interval_s(failures, recovery)
    stretch_s, down_s = work_s + recovery.stall_s, recovery.detect_s + recovery.restart_s
    num_done, lost_s, all_down_s, count = 0, 0.0, 0.0, 0
    while count < num_interruptions:
        up_s = rng.expovariate(1 / mean_s)
        num, inside_s = divmod(up_s, stretch_s)
        if num and inside_s < recovery.write_s:  # the last checkpoint has not arrived
            num, inside_s = num - 1, inside_s + stretch_s
        num_done, lost_s, count = num_done + int(num), lost_s + inside_s, count + 1
        while (next_s := rng.expovariate(1 / mean_s)) < down_s:
            all_down_s, count = all_down_s + next_s, count + 1
        all_down_s += down_s
    total_s = num_done * stretch_s + lost_s + all_down_s
    return Goodput(
        goodput=num_done * work_s / total_s,
        saving=num_done * recovery.stall_s / total_s,
        lost=lost_s / total_s,
        down=all_down_s / total_s,
        interval_s=work_s,
        mtbf_s=mean_s,
    )


def _interval_s(failures: Failures, recovery: Recovery) -> float:
    """Raises PlanError where checkpoints would be on their way longer than it takes to the next one."""
    work_s = recovery.interval_s or best_interval_s(failures, recovery)
    if recovery.write_s > work_s + recovery.stall_s:
        raise PlanError(
            f"a checkpoint is on its way for {recovery.write_s:g} s and the next one comes after {work_s:g} s; save less often"
        )
    return work_s


def _stretch_s(mean_s: float, recovery: Recovery, work_s: float) -> float:
    """Expected seconds until a stretch of work and its checkpoint are through."""
    back_s = recovery.detect_s + recovery.restart_s + recovery.write_s
    exponents = back_s / mean_s, (work_s + recovery.stall_s) / mean_s
    if max(exponents) > _LARGEST_EXPONENT:
        return float("inf")
    return mean_s * exp(exponents[0]) * expm1(exponents[1])
