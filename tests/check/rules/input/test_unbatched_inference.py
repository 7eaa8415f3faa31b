from __future__ import annotations

import pytest
from tests.evidence_builder import EvidenceBuilder, only_finding, proposed

from flatout.check.rules.input.unbatched_inference import RULE
from flatout.core.records.trial import TimeModel

TRIALS = [TimeModel(model=0, variant="batched", backward=False, factor=f) for f in (2, 8)]


def inferring(*, batch_size: int = 1) -> EvidenceBuilder:
    run = EvidenceBuilder(kind="inference", forward=0.09)
    run.model(run.line("infer.py", 12, "scores.append(model(x[None]))"), batch_size=batch_size, is_training=False)
    return run


def test_one_sample_is_tried_twice_and_eight_times_over() -> None:
    assert proposed(RULE, inferring().build()) == TRIALS


def test_a_model_that_hardly_notices_more_samples_is_named() -> None:
    run = inferring()
    run.tried(TRIALS[0], kept=0.55)
    run.tried(TRIALS[1], kept=0.2)
    assert only_finding(RULE, run.build()).saved_s == (pytest.approx(0.0405), pytest.approx(0.072))


def test_a_model_that_takes_twice_as_long_for_two_is_left_alone() -> None:
    run = inferring()
    run.tried(TRIALS[0], kept=0.95)
    run.tried(TRIALS[1], kept=0.9)
    assert not list(RULE.check(run.build()))


def test_batches_are_not_tried() -> None:
    assert not proposed(RULE, inferring(batch_size=32).build())
