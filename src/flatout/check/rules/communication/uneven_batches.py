"""Ranks get batches of different size, and all wait for the largest.

Costs        In each step the difference between the longest and the mean of the ranks' work, as far as it follows from the sizes.
Evidence     Own work and elements of the batch, step by step and rank by rank; work must follow the sizes.
Levers       workload.balanced-batches
False alarm  Sizes that differ while the work does not; work that differs for other reasons.
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean

from flatout.core.parts import rule
from flatout.core.records.evidence import Evidence
from flatout.core.records.finding import Finding
from flatout.core.records.workload import Source
from flatout.machine.cost.waiting import Balance, balance_of

_FEWEST_STEPS = 8
_EXPLAINED = 0.4
"""Share of the variance of work that the sizes must explain (a correlation of 0.63)."""
_UNEVEN = 0.05


def check(evidence: Evidence) -> Iterator[Finding]:
    """Yield one finding when the sizes of the batches make ranks wait."""
    balance = balance_of(evidence.distributed)
    if balance is None or len(balance.steps) < _FEWEST_STEPS or balance.line.explained_fraction < _EXPLAINED:
        return
    if balance.line.slope <= 0 or _unevenness(balance) < _UNEVEN:
        return
    # Long steps weigh more than the median step shows, so the share is taken over all steps.
    saved_s = balance.saved_by_even_sizes * evidence.steps.step_s * _work_fraction(evidence, balance)
    yield Finding(
        where=_where(evidence),
        cost_s=saved_s,
        saved_s=(0.6 * saved_s, saved_s),
        because=f"the largest batch of a step is {1 + _unevenness(balance):.2f} times the mean over ranks, and sizes explain "
        f"{balance.line.explained_fraction:.0%} of the differences in work: they wait {saved_s * 1e3:.2f} ms a step for it",
        edit="share each global batch out by length: sort its samples, longest first, and give each to the rank with the least "
        "work so far (or pack samples to a fixed number of tokens)",
    )


def _work_fraction(evidence: Evidence, balance: Balance) -> float:
    """Share of a step that the longest rank's work makes up; the rest is communication that stays."""
    transfer_s = sum(c.transfer_s for c in evidence.collectives)
    longest_s = fmean(max(row) for row in balance.work_s)
    return longest_s / (longest_s + transfer_s) if longest_s + transfer_s > 0 else 0.0


def _unevenness(balance: Balance) -> float:
    """How much larger the largest batch of a step is than the mean over ranks."""
    ratios = [max(sizes) / fmean(sizes) - 1.0 for sizes in balance.elements if fmean(sizes) > 0]
    return fmean(ratios) if ratios else 0.0


def _where(evidence: Evidence) -> Source | None:
    """The loader that deals out the batches; without one, the call of the model."""
    if evidence.loaders:
        return evidence.source_of(evidence.loaders[0].source)
    return evidence.source_of(evidence.models[0].source) if evidence.models else None


RULE = rule(__name__, check, title="Ranks wait for the one with the largest batch")
