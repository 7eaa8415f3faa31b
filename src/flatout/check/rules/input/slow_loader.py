"""The step waits for its data.

Costs        The whole wait: while a sample is prepared in the main process, nothing else runs.
Evidence     Time in `next()` of the DataLoader in every step, and the function of the data set or collation it is spent in.
             Trial: a batch fetched item by item against the same batch indexed in ready tensors; are items repeatable?
Levers       communication.prepare-in-memory, communication.loader-workers, graph.hoist-constant, graph.compile-loop
False alarm  A first batch that starts workers; a wait shorter than the noise. A script that ended after one pass over its data:
             preparing the items once costs what the pass does, so only workers are advised. Rows of tensors in memory, random
             augmentation and files decoded again are told by input.collate-in-ram, input.python-augmentation and
             input.decoded-every-epoch.
"""

from __future__ import annotations

from collections.abc import Iterator

from flatout.core.parts import rule
from flatout.core.records.evidence import Evidence, Loader
from flatout.core.records.finding import Basis, Finding, Note
from flatout.core.records.trial import TrialResult
from flatout.machine.cost.accounting import milliseconds
from flatout.machine.cost.feeding import (
    dataset_trials,
    fits_memory,
    hot_line,
    is_passed_once,
    python_fraction_low,
    slow_loader,
)


def check(evidence: Evidence) -> Iterator[Finding]:
    """Yield a finding for the loader that is waited for longest."""
    slow = slow_loader(evidence, "other")
    if slow is None:
        return
    loader, result, wait_s, gained = slow
    saved_s, edit = (0.5 * wait_s, 0.9 * wait_s), _edit_workers(loader, evidence)
    basis: Basis = "estimate"
    if _is_worth_preparing(evidence, loader, result):
        saved_s, basis = (0.95 * gained, gained), "trial"
        edit = (
            "the items come out the same each time: prepare them once as tensors and index a whole batch at a time; or "
            + edit
        )
    elif _has_no_core_for_workers(evidence, loader):
        return
    elif result is not None and result.facts.get("repeatable"):
        # Each item is asked for once: it can only be made cheaper. In plain Python that is nearly all of it.
        saved_s = (python_fraction_low(evidence, loader) * gained, 0.98 * gained)
        edit = "make a batch with whole-array operations in place of an item in Python; or " + edit
    hot = hot_line(evidence, loader)
    place = "in the main process" if loader.num_workers == 0 else f"for {loader.num_workers} worker processes"
    yield Finding(
        where=hot.where,
        cost_s=wait_s,
        saved_s=saved_s,
        because=f"each step waits {wait_s * 1e3:.2f} ms {place} for a batch of {loader.dataset}"
        + (f"; {hot.share:.0%} of the time in the data pipeline is in {hot.function}" if hot.share else ""),
        edit=edit,
        also=hot.also,
        phases=("data",),
        basis=basis,
    )


def note(evidence: Evidence) -> Iterator[Note]:
    """Yield a remark where the step waits, and no core is there that a worker could prepare batches on."""
    slow = slow_loader(evidence, "other")
    if slow is None or _is_worth_preparing(evidence, slow.loader, slow.result):
        return
    if _has_no_core_for_workers(evidence, slow.loader):
        hot = hot_line(evidence, slow.loader)
        share = f" ({hot.share:.0%} of the pipeline in {hot.function})" if hot.share else ""
        yield Note(
            where=hot.where,
            text=f"each step waits {milliseconds(slow.wait_s)} for a batch of {slow.loader.dataset}{share}; on this one core a "
            "worker would take its time from the model: make the items cheaper, or give the run another core",
        )


def _is_worth_preparing(evidence: Evidence, loader: Loader, result: TrialResult | None) -> bool:
    """Whether items that come out the same each time are asked for again, and fit the memory."""
    if result is None or not result.facts.get("repeatable") or not fits_memory(evidence, result):
        return False
    return not is_passed_once(evidence, loader, result)


def _has_no_core_for_workers(evidence: Evidence, loader: Loader) -> bool:
    """Whether the model computes on the only core there is."""
    return evidence.workload.device == "cpu" and evidence.workload.num_cores == 1 and loader.num_workers == 0


def _edit_workers(loader: Loader, evidence: Evidence) -> str:
    if _has_no_core_for_workers(evidence, loader):
        return "make them cheaper: vectorise, cache"
    if loader.num_workers == 0:
        return f"overlap it: DataLoader(..., num_workers={max(1, evidence.workload.num_cores - 1)}, persistent_workers=True)"
    return "make the items cheaper (vectorise, cache), then try more workers"


RULE = rule(__name__, check, propose=dataset_trials, note=note)
