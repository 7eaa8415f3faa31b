from __future__ import annotations

import pytest
from tests.evidence_builder import EvidenceBuilder, only_finding

from flatout.check.rules.overhead.distribution_checks import RULE


def test_checks_of_several_lines_are_one_finding_at_the_longest() -> None:
    run = EvidenceBuilder()
    run.use("Distribution.__init__", run.line("ppo.py", 20), 0.004, calls=144, detail="checked")
    run.use("Distribution._validate_sample", run.line("ppo.py", 24), 0.006, calls=144, detail="checked")

    finding = only_finding(RULE, run.build())

    assert finding.where is not None
    assert (finding.where.line, finding.cost_s) == (24, pytest.approx(0.01))
    assert "set_default_validate_args(False)" in finding.edit


def test_distributions_that_check_nothing_are_left_alone() -> None:
    run = EvidenceBuilder()
    run.use("Distribution.__init__", run.line("ppo.py", 20), 0.004, calls=144)
    assert not list(RULE.check(run.build()))
