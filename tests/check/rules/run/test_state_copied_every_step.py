from __future__ import annotations

import pytest
from tests.evidence_builder import EvidenceBuilder, only_finding

from flatout.check.rules.run.state_copied_every_step import RULE


def test_a_deep_copy_of_the_model_in_every_step_is_named() -> None:
    run = EvidenceBuilder()
    line = run.line("train.py", 30, "best = copy.deepcopy(model)")
    run.use("copy.deepcopy", line, 0.02, detail="module", num_bytes=4 << 20)

    finding = only_finding(RULE, run.build())

    assert finding.where is not None
    assert (finding.where.line, finding.cost_s) == (30, pytest.approx(0.02))


def test_a_state_dict_whose_tensors_are_cloned_is_priced_with_its_operators() -> None:
    run = EvidenceBuilder()
    line = run.line("train.py", 30, "best = {k: v.clone() for k, v in model.state_dict().items()}")
    run.use("Module.state_dict", line, 0.001)
    clone = run.operator("aten.clone", line, inputs=[(512, 512)], output=(512, 512), calls=20, op_s=0.01, phase="other")

    finding = only_finding(RULE, run.build())

    assert finding.cost_s == pytest.approx(0.011)
    assert finding.operators == (clone,)


def test_a_copy_of_settings_is_left_alone() -> None:
    run = EvidenceBuilder()
    run.use("copy.deepcopy", run.line("train.py", 30), 0.02, detail="other")
    assert not list(RULE.check(run.build()))


def test_a_state_dict_that_is_only_looked_at_is_left_alone() -> None:
    run = EvidenceBuilder()
    run.use("Module.state_dict", run.line("train.py", 30), 0.02)
    assert not list(RULE.check(run.build()))
