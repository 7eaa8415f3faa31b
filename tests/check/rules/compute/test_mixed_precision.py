"""Products in float32 or TF32 where 16-bit ones are faster: when it is tried, how it is priced, what is advised."""

from __future__ import annotations

import msgspec
import pytest
from tests.evidence_builder import MACHINE, EvidenceBuilder, only_finding, proposed

from flatout.check.rules.compute.mixed_precision import RULE
from flatout.core.records.hardware import Machine
from flatout.core.records.trial import TimeCompiled, TrialResult
from flatout.core.records.usage import ModuleFact

CALL = "loss = F.cross_entropy(net(x), y)"
BUSY_S = 0.09
"""Forward and backward of the builder's step of 100 ms."""


def with_rates(**rates: float) -> Machine:
    return msgspec.structs.replace(MACHINE, matmul_flop_per_s={"float32": 1.0, **rates})


def multiplying(
    *, device_s: float | None = None, text: str = CALL, machine: Machine = MACHINE, op_s: float = 0.06
) -> EvidenceBuilder:
    run = EvidenceBuilder(device_s=device_s, machine=machine)
    run.model(run.line("train.py", 20, text))
    run.operator("aten.addmm", run.line("model.py", 9), inputs=[(256, 256), (256, 256)], op_s=op_s)
    return run


def tried(run: EvidenceBuilder, *, kept: float) -> EvidenceBuilder:
    run.tried(*proposed(RULE, run.build()), kept=kept)
    return run


@pytest.mark.parametrize("device_s", [None, 0.095])
def test_the_module_is_tried_under_autocast_on_any_device(device_s: float | None) -> None:
    [trial] = proposed(RULE, multiplying(device_s=device_s).build())
    assert trial.variant == "bf16-autocast"  # type: ignore[attr-defined]
    assert trial.backward  # type: ignore[attr-defined]


def test_it_is_priced_by_the_modules_share_of_the_step() -> None:
    finding = only_finding(RULE, tried(multiplying(), kept=0.5).build())
    assert finding.saved_s[0] < BUSY_S / 2 < finding.saved_s[1]
    assert finding.where is not None
    assert finding.where.line == 20
    assert "torch.autocast('cpu', dtype=torch.bfloat16)" in finding.edit


def test_in_inference_weights_in_bfloat16_are_tried_too_and_the_faster_is_advised() -> None:
    run = EvidenceBuilder(kind="inference")
    run.model(run.line("sample.py", 20, "logits = model(x)"), graphs_built=0, graphs_used=0)
    run.operator("aten.addmm", run.line("model.py", 9), inputs=[(256, 256), (256, 256)], op_s=0.06)
    autocast, weights = proposed(RULE, run.build())
    run.tried(autocast, kept=0.8)
    run.tried(weights, kept=0.4)
    finding = only_finding(RULE, run.build())
    assert "model.to(torch.bfloat16)" in finding.edit
    assert "weights in bfloat16" in finding.because


def test_where_the_loss_contains_derivatives_it_is_a_remark() -> None:
    run = tried(multiplying(), kept=0.5)
    run.facts.append(ModuleFact(name="gradient-of-gradient", module="", kind="", value=1.0, source=0))
    evidence = run.build()
    assert not list(RULE.check(evidence))
    assert RULE.note is not None
    [note] = RULE.note(evidence)
    assert "derivatives" in note.text


def test_what_other_modules_take_is_not_gained() -> None:
    run = multiplying(op_s=0.03)
    run.operator("aten.addmm", run.line("other.py", 9), inputs=[(256, 256)], op_s=0.03, module="Other")
    finding = only_finding(RULE, tried(run, kept=0.5).build())
    assert finding.saved_s[0] < BUSY_S / 4 < finding.saved_s[1]


def test_tf32_that_is_on_is_no_reason_to_leave_it() -> None:
    run = multiplying(device_s=0.095)
    run.setting("float32_matmul_precision", "high")
    finding = only_finding(RULE, tried(run, kept=0.6).build())
    assert "in TF32" in finding.because
    assert "torch.autocast('cuda'" in finding.edit


@pytest.mark.parametrize("text", ["cuda:bfloat16", "cuda:float16", "cpu:bfloat16,cuda:bfloat16"])
def test_an_autocast_in_force_is_left_alone(text: str) -> None:
    run = multiplying(device_s=0.095)
    run.fact("autocast", text=text)
    assert not proposed(RULE, run.build())


def test_an_autocast_for_another_device_does_nothing_and_is_said() -> None:
    run = multiplying(device_s=0.095)
    run.fact("autocast", text="cpu:bfloat16")
    assert "for cpu and does nothing here" in only_finding(RULE, tried(run, kept=0.5).build()).because


def test_nothing_is_tried_where_it_cannot_pay() -> None:
    assert not proposed(RULE, multiplying(op_s=0.005).build())
    assert not proposed(RULE, multiplying(machine=with_rates(bfloat16=1.0)).build())
    assert not proposed(RULE, multiplying(device_s=0.02).build()), "the device waits for its host"


def test_float16_with_a_scaler_where_bfloat16_has_no_units() -> None:
    run = multiplying(device_s=0.095, machine=with_rates(bfloat16=0.5, float16=6.0))
    [trial] = proposed(RULE, run.build())
    assert trial.variant == "fp16-autocast"  # type: ignore[attr-defined]
    assert "GradScaler" in only_finding(RULE, tried(run, kept=0.5).build()).edit


def test_a_librarys_loop_gets_its_own_switch() -> None:
    edit = only_finding(RULE, tried(multiplying(text="trainer.train()"), kept=0.5).build()).edit
    assert "TrainingArguments(bf16=True)" in edit
    assert "with torch.autocast" not in edit


def test_a_small_gain_is_a_remark() -> None:
    evidence = tried(multiplying(), kept=0.9).build()
    assert not list(RULE.check(evidence))
    assert RULE.note is not None
    [note] = RULE.note(evidence)
    assert "1.10x" in note.text


def test_no_gain_is_not_mentioned() -> None:
    evidence = tried(multiplying(), kept=1.2).build()
    assert RULE.note is not None
    assert not [*RULE.check(evidence), *RULE.note(evidence)]


def test_both_cures_together_are_said_where_they_were_tried() -> None:
    run = tried(multiplying(), kept=0.5)
    parts = {"compile": 8.0, "autocast": 0.05, "both": 0.03}
    run.trial(TrialResult(trial=TimeCompiled(model=0, backward=True), now_s=0.1, cured_s=0.08, parts=parts))
    assert "with autocast and compiled 30%" in only_finding(RULE, run.build()).because


@pytest.mark.parametrize(
    ("between", "is_told"), [("aten.add", True), ("aten.relu", False)], ids=["distances", "after a nonlinearity"]
)
def test_what_is_compared_right_after_a_product_stays_outside(between: str, is_told: bool) -> None:
    """Points within a radius, by |a|^2 + |b|^2 - 2ab: in 8 bits others are within it."""
    run = multiplying()
    points = (32, 256, 256)
    line = run.line("points.py", 102, "idx[dist > radius ** 2] = n")
    product = run.operator("aten.bmm", run.line("points.py", 37), inputs=[points, points], output=points, op_s=1e-3)
    sums = run.operator(between, run.line("points.py", 38), inputs=[points], output=points, op_s=1e-4)
    compared = run.operator("aten.gt", line, inputs=[points], output=points, op_s=1e-4, module="Net")
    run.call(compared, run.call(sums, run.call(product, -1, -1)))
    assert ("points.py:102" in only_finding(RULE, tried(run, kept=0.5).build()).edit) == is_told


def test_a_loss_of_probabilities_is_to_be_one_of_logits() -> None:
    run = multiplying()
    assert "with_logits" not in only_finding(RULE, tried(run, kept=0.5).build()).edit
    run.operator("aten.binary_cross_entropy", run.line("train.py", 21), inputs=[(64,), (64,)], op_s=1e-4)
    assert "F.binary_cross_entropy_with_logits" in only_finding(RULE, run.build()).edit
