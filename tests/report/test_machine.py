from __future__ import annotations

from flatout.core.records.hardware import HardwareSpec, Machine
from flatout.machine.specs import catalog
from flatout.report.parts.machine import machine_blocks
from flatout.report.text import plain_text

MACHINE = Machine(
    device_kind="cuda",
    device_name="NVIDIA H200",
    cpu_model="Test CPU",
    num_cores=16,
    num_threads=8,
    torch_version="2.13.0",
    measured_at="2026-11-21T00:00:00+00:00",
    effort="full",
    matmul_flop_per_s={"bfloat16": 795e12, "float32": 51e12},
    sustained_flop_per_s={"bfloat16": 672e12},
    copy_bytes_per_s=4.2e12,
    dispatch_s=5.1e-6,
    dispatch_grad_s=19.3e-6,
    launch_s=5.2e-6,
    h2d_pinned_bytes_per_s=55.5e9,
    seconds=10.1,
    spread={"matmul_flop_per_s.bfloat16": 0.003},
    conditions={"matmul_flop_per_s.bfloat16": "square, n = 8192, random data; 11 samples"},
    unknown={"sync_s": "it raised"},
)


def shown(machine: Machine, spec: HardwareSpec | None) -> str:
    return plain_text(machine_blocks(machine, spec), width=140)


def line_of(text: str, label: str) -> list[str]:
    (line,) = (line for line in text.splitlines() if line.startswith(label))
    return line.split()


def test_a_measured_figure_stands_beside_the_data_sheet_with_the_fraction() -> None:
    text = shown(MACHINE, catalog.load_spec("nvidia-h200"))
    assert "NVIDIA H200 (NVIDIA H200 SXM 141 GB)" in text
    assert line_of(text, "product, bfloat16")[2:11] == [
        "795",
        "TFLOP/s",
        "0.3",
        "%",
        "990",
        "TFLOP/s",
        "80",
        "%",
        "square,",
    ]
    assert line_of(text, "sustained, bfloat16")[2:4] == ["672", "TFLOP/s"]
    assert "87 %" in " ".join(line_of(text, "host to device, pinned"))
    assert "host to device, pageable" not in text


def test_what_is_unknown_is_said() -> None:
    assert "sync_s: not known, it raised" in shown(MACHINE, None)


def test_without_a_data_sheet_there_is_no_fraction() -> None:
    text = shown(MACHINE, None)
    assert "reached" not in text and "data sheet" not in text
    assert "795 TFLOP/s" in text
