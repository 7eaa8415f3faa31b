"""What the recorder of operators knows of a call without a device at hand."""

from __future__ import annotations

import pytest
import torch

from flatout.check.observe.operators.recorder import OperatorRecorder, TensorMeta, waits_for_device
from flatout.core.runtime.source_sites import Sites


def on(device: str) -> TensorMeta:
    return TensorMeta((4,), torch.float32, True, device)


@pytest.mark.parametrize(
    ("name", "inputs", "outputs", "expected"),
    [
        ("aten._local_scalar_dense", [on("cuda")], [], True),
        ("aten._local_scalar_dense", [on("cpu")], [], False),
        ("aten.nonzero", [on("cuda")], [on("cuda")], True),
        ("aten._to_copy", [on("cuda")], [on("cpu")], True),
        ("aten._to_copy", [on("cpu")], [on("cuda")], False),
        ("aten.copy_", [on("cpu"), on("cuda")], [on("cpu")], True),
        ("aten.copy_", [on("cuda"), on("cpu")], [on("cuda")], False),
        ("aten.mm", [on("cuda"), on("cuda")], [on("cuda")], False),
    ],
)
def test_a_call_that_reads_back_what_the_device_created_waits_for_it(
    name: str, inputs: list[TensorMeta], outputs: list[TensorMeta], expected: bool
) -> None:
    assert waits_for_device(name, inputs, outputs) is expected


def test_operators_of_prims_are_recorded_with_what_they_read() -> None:
    recorder = OperatorRecorder(Sites(), phase=lambda: "other", module=lambda: "", is_device=False)
    with recorder:
        recorder.begin()
        written = torch.ops.prims.mul(torch.ones(4).mul(2), torch.ones(4))
    names = [call.key.op for call in recorder.step.calls]
    assert names[-3:] == ["aten.mul", "aten.ones", "prims.mul"]
    assert recorder.step.calls[-1].producers == (len(names) - 3, len(names) - 2)
    assert recorder.has_producer(written)
