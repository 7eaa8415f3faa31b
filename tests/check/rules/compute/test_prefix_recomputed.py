from __future__ import annotations

import msgspec
import pytest
from tests.evidence_builder import EvidenceBuilder, only_finding, proposed

from flatout.check.rules.compute.prefix_recomputed import RULE
from flatout.core.records.evidence import Evidence


def generation(*, prefix_calls: int = 7, compared: int = 7, graphs_used: int = 0) -> EvidenceBuilder:
    """A model called for one token after another."""
    run = EvidenceBuilder(kind="inference", forward=0.095, backward=0.0)
    line = run.line("sample.py", 12, "logits = model(tokens)[:, -1]", loops=(10,))
    run.model(line, call_s=0.09, is_training=False, graphs_built=graphs_used, graphs_used=graphs_used)
    run.models[0] = msgspec.structs.replace(
        run.models[0], num_prefix_calls=prefix_calls, num_compared_calls=compared, captured_length=20
    )
    return run


def built(run: EvidenceBuilder) -> Evidence:
    return run.build()


def test_a_growing_input_is_tried_with_one_position() -> None:
    run = generation()
    [trial] = proposed(RULE, built(run))
    assert (trial.length, trial.cropped_length) == (20, 1)  # type: ignore[union-attr]
    run.tried(trial, kept=0.2, now_s=0.05)

    finding = only_finding(RULE, built(run))

    assert finding.where is not None
    assert finding.where.line == 12
    assert 0.05 < finding.saved_s[0] < finding.saved_s[1] <= 0.09


def test_calls_whose_window_slid_gain_nothing() -> None:
    whole, sliding = generation(), generation(prefix_calls=6, compared=8)
    for run in (whole, sliding):
        run.tried(*proposed(RULE, built(run)), kept=0.2, now_s=0.05)

    slid = only_finding(RULE, built(sliding))

    assert slid.cost_s == pytest.approx(0.75 * only_finding(RULE, built(whole)).cost_s)


def test_inputs_that_are_new_each_time_are_left_alone() -> None:
    assert not proposed(RULE, built(generation(prefix_calls=1)))


def test_a_model_that_is_trained_is_left_alone() -> None:
    assert not proposed(RULE, built(generation(graphs_used=50)))
