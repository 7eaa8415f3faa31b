from __future__ import annotations

import msgspec
import pytest
from tests.check.rules.device_steps import with_device
from tests.evidence_builder import EvidenceBuilder, only_finding

from flatout.check.rules.compute.wave_quantisation import RULE
from flatout.core.records.device import DeviceKernel

PRODUCT = DeviceKernel(
    name="sm90_xmma_gemm", source=0, phase="forward", num_launches=10, seconds=0.05,
    num_blocks=140, blocks_per_sm=1, uses_matrix_units=True, op="aten.mm",
)  # fmt: skip


def test_a_last_round_that_is_nearly_empty_is_priced() -> None:
    run = EvidenceBuilder(device_s=0.098)
    run.line("model.py", 8, "return self.out(x)")
    finding = only_finding(RULE, with_device(run, kernels=[PRODUCT]))
    assert finding.where is not None
    assert finding.where.line == 8
    assert finding.saved_s[1] == pytest.approx(0.8 * 0.05 * (1 - 140 / 264))


@pytest.mark.parametrize(
    "change",
    [
        {"num_blocks": 132},
        {"num_blocks": 100},
        {"num_blocks": 264},
        {"num_blocks": 2650},
        {"num_blocks": 0},
        {"blocks_per_sm": 0},
        {"blocks_per_sm": 2},
        {"uses_matrix_units": False},
        {"uses_matrix_units": None},
    ],
    ids=str,
)
def test_full_rounds_many_rounds_and_unknown_launches_are_left_alone(change: dict[str, object]) -> None:
    run = EvidenceBuilder(device_s=0.098)
    run.line("model.py", 8)
    assert list(RULE.check(with_device(run, kernels=[msgspec.structs.replace(PRODUCT, **change)]))) == []


def test_on_a_device_that_waits_for_the_host_it_gains_nothing() -> None:
    run = EvidenceBuilder(device_s=0.05)
    run.line("model.py", 8)
    assert list(RULE.check(with_device(run, kernels=[PRODUCT]))) == []
