from __future__ import annotations

import msgspec
import pytest
from tests.check.rules.input.loading import fetched, waiting
from tests.evidence_builder import EvidenceBuilder, only_finding, proposed

from flatout.check.rules.input.worker_count import RULE
from flatout.core.records.trial import TimeWorkers, TrialResult


def tried(run: EvidenceBuilder, *, alone_s: float, **with_workers: float) -> None:
    """The sweep ran; `with_workers` are seconds of batch and model by number of workers (w1, w2)."""
    [trial] = proposed(RULE, run.build())
    assert isinstance(trial, TimeWorkers)
    parts = {name.removeprefix("w"): seconds for name, seconds in with_workers.items()}
    parts |= {str(c): max(parts.values()) for c in trial.counts if str(c) not in parts}
    best = min(parts, key=lambda name: parts[name])
    run.trial(TrialResult(trial=trial, now_s=alone_s, cured_s=parts[best], variant=best, parts=parts))


def test_too_few_workers_are_priced_by_the_sweep() -> None:
    run = waiting(wait_s=0.06, num_workers=1)
    tried(run, alone_s=0.04, w1=0.1, w2=0.06, w4=0.045)
    finding = only_finding(RULE, run.build())
    assert "num_workers=4" in finding.edit
    assert finding.saved_s[1] == pytest.approx(0.055)


def test_random_items_without_workers_are_tried_with_some() -> None:
    run = waiting(wait_s=0.06)
    fetched(run, repeatable=False)
    tried(run, alone_s=0.04, w1=0.07, w2=0.05, w4=0.05)
    finding = only_finding(RULE, run.build())
    assert "num_workers=2" in finding.edit
    assert finding.saved_s[1] == pytest.approx(0.05)


def test_more_workers_than_cores_are_tried_with_fewer() -> None:
    run = waiting(wait_s=0.0, num_workers=8)
    tried(run, alone_s=0.04, w8=0.09, w1=0.05, w2=0.06)
    finding = only_finding(RULE, run.build())
    assert "num_workers=1" in finding.edit
    assert "too many" in finding.because


def test_the_best_number_is_left_alone() -> None:
    run = waiting(wait_s=0.06, num_workers=2)
    tried(run, alone_s=0.04, w2=0.05, w1=0.09)
    assert not list(RULE.check(run.build()))


def test_workers_that_keep_up_need_no_help() -> None:
    run = waiting(wait_s=0.02, num_workers=1)
    fetched(run, now_s=0.01, repeatable=False)
    tried(run, alone_s=0.04, w1=0.1, w2=0.06)
    assert not list(RULE.check(run.build()))


def test_items_that_can_be_prepared_once_are_left_to_the_better_cure() -> None:
    run = waiting(wait_s=0.06)
    fetched(run, repeatable=True)
    assert not proposed(RULE, run.build())


@pytest.mark.parametrize("loader", [{"wait_s": 0.001}, {"is_map_style": False}])
def test_short_waits_and_streams_are_not_tried(loader: dict[str, float]) -> None:
    assert not proposed(RULE, waiting(**loader).build())  # type: ignore[arg-type]


@pytest.mark.parametrize(("text", "is_told"), [("DataLoader(data, **kwargs)", True), ("DataLoader(data)", False)])
def test_where_the_line_unpacks_keyword_arguments_the_number_is_among_them(text: str, is_told: bool) -> None:
    run = waiting(wait_s=0.06, num_workers=1)
    made = run.line("train.py", 99, text)
    run.loaders[0] = msgspec.structs.replace(run.loaders[0], constructed=made)
    tried(run, alone_s=0.04, w1=0.1, w2=0.06, w4=0.045)
    assert ("keyword arguments" in only_finding(RULE, run.build()).edit) == is_told
