"""What a search tries of what trials had no time to confirm while the script was observed."""

from __future__ import annotations

import pytest
from tests.evidence_builder import EvidenceBuilder

from flatout.core.records.evidence import Evidence
from flatout.core.records.lever import Candidate
from flatout.core.records.trial import TimeDataset, TimeModel, Trial, TrialResult
from flatout.core.registry import levers, rules
from flatout.machine.cost.untried import as_if_tried
from flatout.tune.search.proposals import lever_proposals


def late(trial: Trial) -> TrialResult:
    return TrialResult(trial=trial, refused="the 5 s for trials were spent", is_out_of_time=True)


def proposed(evidence: Evidence, lever: str) -> list[Candidate]:
    return [c for c in lever_proposals(evidence, rules(), levers()).candidates if c.lever == lever]


def evaluating() -> EvidenceBuilder:
    run = EvidenceBuilder(forward=0.03, backward=0.05)
    run.model(run.line("train.py", 5, "net(x)"))
    run.model(run.line("train.py", 9, "net(v)"), is_training=False, graphs_used=0)
    return run


TRIAL = TimeModel(model=1, variant="without-graph", backward=False)


def test_what_a_trial_without_time_might_have_confirmed_is_proposed_with_no_gain_for_certain() -> None:
    run = evaluating()
    assert not proposed(run.build(), "graph.inference-mode")
    run.trial(late(TRIAL))
    [candidate] = proposed(run.build(), "graph.inference-mode")
    assert candidate.saved_s[0] == 0 < candidate.saved_s[1]
    assert "was not measured while the script was observed" in candidate.because
    assert "tried" not in candidate.because
    refused = [r.lever for r in lever_proposals(run.build(), rules(), levers()).refusals]
    assert "graph.inference-mode" not in refused


@pytest.mark.parametrize("kept", [0.4, 1.0])
def test_what_a_trial_measured_is_not_guessed(kept: float) -> None:
    run = evaluating()
    run.tried(TRIAL, kept=kept)
    run.trial(late(TimeModel(model=0, variant="cropped", backward=True)))
    found = proposed(run.build(), "graph.inference-mode")
    assert all("was not measured" not in candidate.because for candidate in found)
    assert all(candidate.saved_s[1] == 0 for candidate in found) or kept < 1


def test_whether_a_data_set_repeats_itself_is_not_guessed() -> None:
    run = evaluating()
    run.trial(late(TimeDataset(loader=0)))
    assert as_if_tried(run.build()) is None


def test_evidence_whose_trials_all_ran_is_left_alone() -> None:
    run = evaluating()
    run.tried(TRIAL, kept=0.5)
    run.refused(TimeModel(model=0, variant="cropped", backward=True), why="it was given up")
    assert as_if_tried(run.build()) is None
