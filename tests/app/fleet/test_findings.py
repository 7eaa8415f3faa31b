from __future__ import annotations

import os

import msgspec
import pytest
from tests.evidence_builder import EvidenceBuilder, tensor
from tests.fleet_jobs import job

from flatout.app.fleet.findings import flop_utilisation, with_diagnosis
from flatout.check.diagnosis import diagnose
from flatout.core.records.evidence import Evidence
from flatout.core.registry import rules


def on_device(evidence: Evidence, name: str) -> Evidence:
    return msgspec.structs.replace(evidence, workload=msgspec.structs.replace(evidence.workload, device=name))


def with_products(dtype: str, flop: int) -> Evidence:
    run = EvidenceBuilder(step_s=0.1)
    line = run.line("train.py", 3, "y = net(x)")
    size = tensor(1024, 1024, dtype=dtype)
    run.operator("aten.mm", line, inputs=[size, size], output=size, calls=10, flop=flop // 10, op_s=0.05)
    run.operator("aten.add", line, inputs=[tensor(1024, dtype="float32")], flop=1000)
    return run.build()


@pytest.mark.parametrize(
    ("dtype", "has_tf32", "rate"),
    [("bfloat16", False, 989e12), ("float32", True, 495e12), ("float32", False, 67e12)],
)
def test_mfu_is_over_the_data_sheets_rate_of_the_dtype_that_most_flop_have(
    dtype: str, has_tf32: bool, rate: float
) -> None:
    flop = int(0.1 * 0.4 * rate)  # of a step of 0.1 s
    evidence = on_device(with_products(dtype, flop), "NVIDIA H200")

    assert flop_utilisation(evidence, flop / 0.1, has_tf32=has_tf32) == pytest.approx(0.4, rel=0.02)


@pytest.mark.parametrize("device", ["cpu", "NVIDIA H200 NVL"])
def test_without_a_data_sheet_there_is_no_mfu(device: str) -> None:
    assert flop_utilisation(on_device(with_products("bfloat16", 10**12), device), 1e13, has_tf32=True) is None


def test_a_look_fills_in_causes_phases_and_the_step() -> None:
    run = EvidenceBuilder(step_s=0.1)
    run.steps = msgspec.structs.replace(run.steps, phases={"data": 0.06, "forward": 0.02, "backward": 0.02})
    evidence = run.build()
    diagnosis = diagnose(evidence, rules())

    found = with_diagnosis(job(step_s=None, saved_fraction=None), evidence, diagnosis, has_tf32=False)

    assert (found.step_s, found.low_s, found.high_s) == (
        evidence.steps.step_s,
        evidence.steps.low_s,
        evidence.steps.high_s,
    )
    assert found.phases == pytest.approx({"data": 0.6, "forward": 0.2, "backward": 0.2})
    assert found.saved_fraction is not None
    assert [f.rule for f in found.findings] == [f.rule for f in diagnosis.findings if f.saves_time][:5]
    assert all(not os.path.isabs(f.file) or f.file.startswith("/home/ada") for f in found.findings)
