from __future__ import annotations

import pytest
from tests.evidence_builder import EvidenceBuilder, only_finding

from flatout.check.diagnosis import diagnose
from flatout.check.rules.overhead.logging import RULE


def test_several_lines_that_log_are_one_finding() -> None:
    run = EvidenceBuilder()
    run.use("tqdm.set_postfix", run.line("train.py", 20), 0.004)
    run.use("SummaryWriter.add_scalar", run.line("train.py", 22), 0.006, calls=12)

    finding = only_finding(RULE, run.build())

    assert finding.where is not None
    assert (finding.where.line, finding.cost_s) == (22, pytest.approx(0.01))
    assert [s.line for s in finding.also] == [20]


def test_a_print_now_and_then_is_left_alone() -> None:
    run = EvidenceBuilder()
    run.use("print", run.line("train.py", 20), 0.0002, calls=0.1)
    assert diagnose(run.build(), [RULE]).findings == ()


def test_other_calls_are_no_logging() -> None:
    run = EvidenceBuilder()
    run.use("torch.save", run.line("train.py", 20), 0.03)
    assert not list(RULE.check(run.build()))


def test_a_line_that_logs_values_from_a_device_is_noted() -> None:
    run = EvidenceBuilder(device_s=0.05)
    line = run.line("train.py", 20)
    run.use("print", line, 0.0002)
    run.host_read(line, on_device=True)
    assert len(diagnose(run.build(), [RULE]).notes) == 1
