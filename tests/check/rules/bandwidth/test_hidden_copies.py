from __future__ import annotations

from tests.evidence_builder import EvidenceBuilder, only_finding, proposed, tensor

from flatout.check.diagnosis import diagnose
from flatout.check.rules.bandwidth.hidden_copies import RULE
from flatout.core.records.evidence import TensorSpec
from flatout.core.records.trial import TimeStrides

STRIDED = TensorSpec(shape=(256, 256), dtype="float32", is_contiguous=False)


def copied(*, reader: str = "aten.mm", source: TensorSpec = STRIDED) -> EvidenceBuilder:
    """`.contiguous()` on line 9 and an operator on line 10 that reads the copy as its second tensor."""
    run = EvidenceBuilder()
    copy = run.operator("aten.clone", run.line("model.py", 9), inputs=[source], output=(256, 256), op_s=0.02)
    read = run.operator(reader, run.line("model.py", 10), inputs=[tensor(256, 256), tensor(256, 256)], op_s=0.01)
    run.call(read, -1, run.call(copy, -1))
    return run


def test_a_copy_that_its_reader_does_not_need_is_priced_and_found() -> None:
    run = copied()
    (trial,) = proposed(RULE, run.build())
    assert trial == TimeStrides(copy=0, reader=1, argument=1)
    run.tried(trial, kept=0.4)
    finding = only_finding(RULE, run.build())
    assert finding.where is not None
    assert finding.where.line == 9
    assert finding.saved_s[0] < 0.6 * 0.03 < finding.saved_s[1]


def test_a_copy_that_a_view_needs_is_left_alone() -> None:
    assert not proposed(RULE, copied(reader="aten._unsafe_view").build())


def test_a_copy_of_a_contiguous_tensor_is_another_matter() -> None:
    assert not proposed(RULE, copied(source=tensor(256, 256)).build())


def test_a_copy_that_pays_for_itself_is_left_alone() -> None:
    run = copied()
    run.tried(*proposed(RULE, run.build()), kept=1.5)
    assert diagnose(run.build(), [RULE]).findings == ()
