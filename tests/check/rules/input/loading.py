"""A loop over a loader that its steps wait for, as the tests of several rules need it."""

from __future__ import annotations

from typing import Any

from tests.evidence_builder import EvidenceBuilder

from flatout.core.records.trial import TimeDataset, TrialResult


def waiting(
    *, wait_s: float = 0.06, hot: str = "return warp(self.rows[i])", restart_s: float = 0.0, **loader: Any
) -> EvidenceBuilder:
    """A loop on line 16 of train.py over a loader made on line 9; its data set spends its time on line 5 of data.py."""
    run = EvidenceBuilder(data=wait_s + restart_s, restart_s=restart_s)
    loop, made = run.line("train.py", 16, "for x, y in loader:"), run.line("train.py", 9, "loader = DataLoader(data)")
    process = "worker" if loader.get("num_workers") else "main"
    run.loader(loop, wait_s=wait_s, constructed=made, **loader)
    run.sampled(run.line("data.py", 5, hot, function="Data.__getitem__"), 0.9 * wait_s, phase="data", process=process)
    return run


def fetched(run: EvidenceBuilder, *, now_s: float = 0.06, cured_s: float = 0.001, **facts: bool) -> None:
    """The data set was tried by hand."""
    parts = {"item": now_s / 32, "collate": 0.001, "item_bytes": 1000.0, "num_items": 5000.0}
    known = {"repeatable": True, "views": False, "takes_batches": False, "item_by_item": True}
    run.trial(TrialResult(trial=TimeDataset(loader=0), now_s=now_s, cured_s=cured_s, parts=parts, facts=known | facts))
