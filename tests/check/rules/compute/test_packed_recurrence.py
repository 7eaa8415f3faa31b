from __future__ import annotations

import pytest
from tests.evidence_builder import EvidenceBuilder, only_finding, proposed

from flatout.check.rules.compute.packed_recurrence import RULE


def packed(*, fused: bool = False, device_s: float | None = None) -> EvidenceBuilder:
    """A model of which one line packs its batch before a recurrent layer."""
    run = EvidenceBuilder(device_s=device_s)
    packing = run.line("model.py", 8, "x = pack_padded_sequence(x, lengths, batch_first=True)")
    layer = run.line("model.py", 9, "out, h = self.rnn(x)")
    run.operator("aten._pack_padded_sequence", packing, inputs=[(32, 90, 16)], output=(1800, 16), op_s=0.0001)
    run.operator("aten.mkldnn_rnn_layer" if fused else "aten.addmm", layer, output=(32, 64), op_s=0.03)
    run.model(layer)
    return run


def test_the_layer_is_tried_on_the_padded_batch_and_the_packing_line_named() -> None:
    run = packed()
    trials = proposed(RULE, run.build())
    assert [t.variant for t in trials] == ["unpacked"]  # type: ignore[union-attr]
    run.tried(*trials, kept=0.4)

    finding = only_finding(RULE, run.build())

    assert finding.where is not None
    assert finding.where.line == 8
    assert sum(finding.saved_s) / 2 == pytest.approx(0.6 * 0.09)


def test_a_layer_that_keeps_its_fused_kernel_is_left_alone() -> None:
    assert not proposed(RULE, packed(fused=True).build())


def test_a_device_takes_packed_batches_as_they_are() -> None:
    assert not proposed(RULE, packed(device_s=0.05).build())
