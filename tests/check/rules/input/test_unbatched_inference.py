from __future__ import annotations

import msgspec
import pytest
from tests.evidence_builder import EvidenceBuilder, only_finding, proposed, tensor

from flatout.check.rules.input.unbatched_inference import RULE
from flatout.core.records.evidence import TensorSpec
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


def generating(text: str = "output = model(input)") -> EvidenceBuilder:
    """Indices of shape (1, 1) go into the model."""
    run = EvidenceBuilder(kind="inference", forward=0.09)
    run.model(run.line("generate.py", 12, text), batch_size=1, is_training=False)
    embedding = run.operator("aten.embedding", inputs=[(100, 8), TOKEN], output=(1, 1, 8), module="Net.encoder")
    run.call(embedding, -1, -1)
    return run


TOKEN = tensor(1, 1, dtype="int64")


def test_a_call_that_nothing_feeds_back_is_tried() -> None:
    assert proposed(RULE, generating().build()) == TRIALS


@pytest.mark.parametrize(
    ("join", "inputs"), [("aten.fill_", [TOKEN, tensor(dtype="int64")]), ("aten.cat", [TOKEN] * 2)]
)
@pytest.mark.parametrize("is_fed", [True, False])
def test_an_input_written_from_what_the_model_gave_is_generation(
    join: str, inputs: list[TensorSpec], is_fed: bool
) -> None:
    run = generating()
    sampled = run.call(
        run.operator("aten.multinomial", inputs=[(1, 100)], output=tensor(1, dtype="int64"), module=""), 0
    )
    row = run.operator(join, inputs=inputs, output=TOKEN, module="")
    run.call(row, -1, sampled if is_fed else -1)
    assert bool(proposed(RULE, run.build())) is not is_fed


def test_results_written_into_a_buffer_are_no_generation() -> None:
    run = generating()
    row = run.operator("aten.copy_", inputs=[tensor(dtype="int64")] * 2, output=tensor(dtype="int64"), module="")
    run.call(row, -1, 0)
    assert proposed(RULE, run.build()) == TRIALS


def test_an_index_made_from_a_number_that_was_read_is_generation() -> None:
    run = generating()
    make = run.operator("aten.lift_fresh", inputs=[TOKEN], output=TOKEN, module="")
    run.call(run.operator("aten._local_scalar_dense", inputs=[(1,)], module=""), 0)
    run.call(make, -1)
    assert not proposed(RULE, run.build())


@pytest.mark.parametrize(
    ("text", "is_state"),
    [
        ("output, hidden = model(input, hidden)", True),
        ("y, (h, c) = model(x, state=(h, c))", True),
        ("y, h = model(x, h0)", False),
        ("x = model(x)", False),
        ("scores.append(model(x, h))", False),
        ("y, h = model(", False),
    ],
)
def test_a_state_that_is_passed_and_assigned_is_no_unbatched_sample(text: str, is_state: bool) -> None:
    assert bool(proposed(RULE, generating(text).build())) is not is_state


def test_a_sequence_that_grows_is_no_unbatched_sample() -> None:
    run = generating()
    run.models[0] = msgspec.structs.replace(run.models[0], num_compared_calls=50, num_prefix_calls=48)
    assert not proposed(RULE, run.build())


def test_an_environment_that_waits_for_the_action_is_left_alone() -> None:
    run = inferring()
    run.steps = msgspec.structs.replace(run.steps, phases=run.steps.phases | {"environment": 0.01})
    assert not proposed(RULE, run.build())
