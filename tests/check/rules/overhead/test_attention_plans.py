"""overhead.attention-plans: found where calls of cuDNN's attention keep the host for long, on shapes that differ."""

from __future__ import annotations

import pytest
from tests.evidence_builder import EvidenceBuilder, only_finding

from flatout.check.diagnosis import diagnose
from flatout.check.rules.overhead.attention_plans import RULE

FORWARD, BACKWARD = (f"aten._scaled_dot_product_cudnn_attention{end}" for end in ("", "_backward"))


def attending(*widths: int, host_s: float = 0.1, steps: int = 4) -> EvidenceBuilder:
    """Attention of line 7 in some steps: each width is met in one of them, in 12 layers, the first of which builds plans."""
    run = EvidenceBuilder(device_s=0.05, forward=0.06, backward=0.06)
    line = run.line("model.py", 7, "F.scaled_dot_product_attention(q, k, v)")
    for width in widths:
        for op, phase in ((FORWARD, "forward"), (BACKWARD, "backward")):
            shape = (8, 12, width, 64)
            run.operator(
                op,
                line,
                inputs=[shape],
                output=shape,
                calls=12 / steps,
                op_s=0.0005,
                python_s=host_s / steps,
                phase=phase,
            )
    return run


def test_plans_for_new_shapes_are_found_with_their_seconds_and_their_line() -> None:
    finding = only_finding(RULE, attending(320, 352, 384).build())
    assert finding.where is not None and finding.where.line == 7
    assert finding.cost_s == pytest.approx(min(6 * 0.1 / 4, 0.12), rel=0.3)
    assert finding.saved_s[0] < finding.saved_s[1]
    assert "each new shape of attention: 3 in" in finding.because
    assert finding.levers == ("memory.attention-without-plans",)


def test_one_shape_is_enough_where_all_steps_wait_as_long() -> None:
    """A step is looked at after those that were timed: had they all had its shape, their plans would have been there."""
    finding = only_finding(RULE, attending(512, steps=1, host_s=0.0245).build())
    assert finding.cost_s == pytest.approx(0.049)


@pytest.mark.parametrize(
    "run",
    [
        pytest.param(attending(512, steps=1, host_s=0.3), id="one shape, whose plan took longer than usual steps wait"),
        pytest.param(attending(320, 352, 384, host_s=0.0006), id="plans that are there"),
        pytest.param(EvidenceBuilder(device_s=0.05), id="no attention"),
    ],
)
def test_it_is_left_alone(run: EvidenceBuilder) -> None:
    diagnosis = diagnose(run.build(), [RULE])
    assert (diagnosis.findings, diagnosis.notes) == ((), ())
