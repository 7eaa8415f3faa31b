from __future__ import annotations

import pytest
from tests.evidence_builder import EvidenceBuilder, only_finding, proposed

from flatout.check.diagnosis import diagnose
from flatout.check.rules.run.thread_count import RULE
from flatout.core.records.trial import TimeModel


def with_threads(num: int, *, quota: str = "", sharing: str = "", device_s: float | None = None) -> EvidenceBuilder:
    """A machine of eight cores."""
    run = EvidenceBuilder(device_s=device_s)
    run.model(run.line("train.py", 20, "out = net(x)"))
    run.num_threads = num
    run.setting("cpu_quota", quota)
    run.setting("LOCAL_WORLD_SIZE", sharing)
    return run


@pytest.mark.parametrize(
    ("num", "quota", "sharing", "wanted"), [(1, "", "", 8), (16, "", "", 8), (8, "2.0", "", 2), (1, "", "4", 2)]
)
def test_as_many_threads_as_cores_are_tried(num: int, quota: str, sharing: str, wanted: int) -> None:
    (trial,) = proposed(RULE, with_threads(num, quota=quota, sharing=sharing).build())
    assert trial == TimeModel(model=0, variant="threads", backward=True, factor=wanted)


def test_idle_cores_are_found_at_the_line_that_set_the_number() -> None:
    run = with_threads(1)
    run.setting("num_threads", "1", run.line("train.py", 3, "torch.set_num_threads(1)"))
    run.tried(*proposed(RULE, run.build()), kept=0.4)
    finding = only_finding(RULE, run.build())
    assert finding.where is not None
    assert finding.where.line == 3


def test_a_fitting_number_and_devices_are_not_tried() -> None:
    assert not proposed(RULE, with_threads(8).build())
    assert not proposed(RULE, with_threads(1, device_s=0.09).build())


def test_a_trial_without_gain_is_not_reported() -> None:
    run = with_threads(1)
    run.tried(*proposed(RULE, run.build()), kept=1.0)
    assert diagnose(run.build(), [RULE]).findings == ()


def test_far_more_workers_than_cores_are_a_note() -> None:
    assert RULE.note is not None
    run = with_threads(8)
    run.loader(num_workers=32)
    assert len(list(RULE.note(run.build()))) == 1
    run = with_threads(8)
    run.loader(num_workers=8)
    assert not list(RULE.note(run.build()))


def test_fewer_threads_by_the_environment_are_a_note_with_their_price() -> None:
    assert RULE.note is not None
    run = with_threads(1)
    run.setting("OMP_NUM_THREADS", "1")
    run.tried(*proposed(RULE, run.build()), kept=0.4)
    assert not list(RULE.check(run.build()))
    (note,) = RULE.note(run.build())
    assert "40%" in note.text


def test_more_threads_than_cores_by_the_environment_are_a_finding() -> None:
    run = with_threads(64)
    run.setting("OMP_NUM_THREADS", "64")
    run.tried(*proposed(RULE, run.build()), kept=0.4)
    assert only_finding(RULE, run.build()).basis == "trial"
