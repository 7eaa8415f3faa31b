from __future__ import annotations

from tests.evidence_builder import EvidenceBuilder, only_finding, proposed

from flatout.check.diagnosis import diagnose
from flatout.check.rules.bandwidth.memory_format import RULE
from flatout.core.records.evidence import TensorSpec
from flatout.core.records.trial import TimeModel, TrialResult

IMAGES = (16, 32, 32, 32)


def convolved(*, op_s: float = 0.05, contiguous: bool = True, shape: tuple[int, ...] = IMAGES) -> EvidenceBuilder:
    run = EvidenceBuilder()
    run.model(run.line("train.py", 20, "out = net(x)"))
    images = TensorSpec(shape=shape, dtype="float32", is_contiguous=contiguous)
    run.operator("aten.convolution", run.line("model.py", 9), inputs=[images, (32, 32, 3, 3)], output=shape, op_s=op_s)
    return run


def test_channels_last_is_tried_and_told_where_the_module_is_called() -> None:
    run = convolved()
    (trial,) = proposed(RULE, run.build())
    assert trial == TimeModel(model=0, variant="channels-last", backward=True)
    run.tried(trial, kept=0.7)
    finding = only_finding(RULE, run.build())
    assert finding.where is not None
    assert finding.where.line == 20


def test_a_format_that_gains_nothing_is_left_alone() -> None:
    run = convolved()
    run.tried(*proposed(RULE, run.build()), kept=1.05)
    assert diagnose(run.build(), [RULE]).findings == ()


def test_channels_last_already_signals_and_cheap_convolutions_are_not_tried() -> None:
    for run in (convolved(contiguous=False), convolved(shape=(16, 32, 100)), convolved(op_s=0.01)):
        assert not proposed(RULE, run.build())


def test_images_of_one_channel_or_one_pixel_have_no_other_order() -> None:
    for shape in ((6, 1, 20, 2), (16, 32, 1, 1)):
        assert not proposed(RULE, convolved(shape=shape).build())


def test_a_first_layer_of_one_channel_leaves_the_others_worth_a_trial() -> None:
    run = convolved()
    gray = TensorSpec(shape=(16, 1, 32, 32), dtype="float32", is_contiguous=True)
    run.operator("aten.convolution", run.line("model.py", 8), inputs=[gray, (32, 1, 3, 3)], output=IMAGES, op_s=0.01)
    assert proposed(RULE, run.build())


def test_a_gain_within_the_spread_of_the_trial_is_no_gain() -> None:
    run = convolved()
    (trial,) = proposed(RULE, run.build())
    run.trial(TrialResult(trial=trial, now_s=0.1, cured_s=0.08, spread_fraction=0.3))
    assert not list(RULE.check(run.build()))


def test_the_strides_of_a_gradient_do_not_matter() -> None:
    run = EvidenceBuilder()
    run.model(run.line("train.py", 20, "out = net(x)"))
    gradient = TensorSpec(shape=IMAGES, dtype="float32", is_contiguous=False)
    images = TensorSpec(shape=IMAGES, dtype="float32", is_contiguous=True)
    run.operator(
        "aten.convolution_backward",
        run.line("model.py", 9),
        inputs=[gradient, images, (32, 32, 3, 3)],
        output=IMAGES,
        op_s=0.05,
        phase="backward",
    )
    assert proposed(RULE, run.build())


def test_of_several_modules_the_one_that_was_tried_is_named() -> None:
    run = convolved()
    run.model(run.line("train.py", 24, "score = judge(out)"), name="Judge", call_s=0.001)
    run.tried(*proposed(RULE, run.build()), kept=0.7)
    assert only_finding(RULE, run.build()).edit.endswith("; Net alone was tried")


def test_a_module_that_takes_no_images_is_converted_alone() -> None:
    """A generator makes its images from a vector, which has no channels to put last."""
    edits = []
    for first in (IMAGES, (16, 100)):
        run = EvidenceBuilder()
        run.model(run.line("train.py", 20, "images = generator(z)"), name="Generator")
        run.operator("aten.addmm", run.line("model.py", 8), inputs=[first, (100, 64)], op_s=1e-3, module="Generator")
        images = TensorSpec(shape=IMAGES, dtype="float32", is_contiguous=True)
        run.operator(
            "aten.convolution", run.line("model.py", 9), inputs=[images, (32, 32, 3, 3)], output=IMAGES, op_s=0.05
        )
        run.tried(*proposed(RULE, run.build()), kept=0.7)
        edits.append(only_finding(RULE, run.build()).edit)
    assert "images.to" in edits[0]
    assert "images.to" not in edits[1]
