from __future__ import annotations

import pytest
from tests.evidence_builder import EvidenceBuilder, only_finding, tensor

from flatout.check.rules.compute.pointless_grad_scaler import RULE


def scaling(autocast: str, *, enabled: bool = True) -> EvidenceBuilder:
    """A GradScaler on lines 30 and 32 of train.py, under autocast of this dtype."""
    run = EvidenceBuilder()
    detail = f"enabled={enabled}, device=cuda, autocast={autocast}"
    run.use("GradScaler.scale", run.line("train.py", 30), 0.001, detail=detail)
    run.use("GradScaler.update", run.line("train.py", 32), 0.001, detail=detail)
    run.operator("aten._amp_foreach_non_finite_check_and_unscale_", run.line("train.py", 31), op_s=0.004, phase="other")
    return run


@pytest.mark.parametrize("autocast", ["bfloat16", "none"])
def test_a_scaler_without_float16_is_named(autocast: str) -> None:
    finding = only_finding(RULE, scaling(autocast).build())
    assert finding.cost_s == pytest.approx(0.006)
    assert finding.where is not None
    assert finding.where.line in (30, 32)


def test_a_scaler_with_float16_is_left_alone() -> None:
    assert not list(RULE.check(scaling("float16").build()))


def test_a_scaler_that_is_switched_off_is_left_alone() -> None:
    assert not list(RULE.check(scaling("bfloat16", enabled=False).build()))


def test_a_scaler_of_a_model_with_float16_weights_is_left_alone() -> None:
    run = scaling("none")
    run.operator("aten.mm", inputs=[tensor(8, 8, dtype="float32")], output=(8, 8))
    assert list(RULE.check(run.build()))
