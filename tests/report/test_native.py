"""The text of a native engine's report."""

from __future__ import annotations

from msgspec import structs

from flatout.core.records.native import Latency, NativeLayer, NativeReport
from flatout.report.parts.native import native_blocks, reached_fraction
from flatout.report.text import plain_lines

REPORT = NativeReport(
    hardware="Example CPU",
    isa="avx512",
    compiler="gcc 12.2",
    build_s=2.5,
    layers=(
        NativeLayer(name="cell.weight_ih", rows=1, inputs=16, outputs=192, weight_bytes=12288),
        NativeLayer(
            name="head.weight", rows=1, inputs=64, outputs=4, weight_bytes=256, precision="int8", why="error 1e-3"
        ),
    ),
    weight_bytes=64 * 1024,
    state_bytes=256,
    floor_s=0.5e-6,
    python=Latency(p50_s=1.2e-6, p99_s=1.5e-6, p999_s=4e-6, num_events=20000),
    native=Latency(p50_s=1e-6, p99_s=1.1e-6, p999_s=2e-6, num_events=20000),
    errors={"y": 2e-7, "h": 3e-7},
    eager_errors={"y": 4e-7},
)


def native_text(report: NativeReport) -> str:
    return "\n".join(plain_lines(native_blocks(report)))


EXPECTED = """\
Example CPU, avx512, gcc 12.2; built in 2.50 s
weights 64.0 KiB, state of a stream 256 B

one event        p50      p99    p99.9  events
from Python  1.20 us  1.50 us  4.00 us   20000
in C         1.00 us  1.10 us  2.00 us   20000
floor 500 ns: its weights, read once from the smallest cache that holds them; 50 % of that speed is reached

layer           rows x in -> out   weights  precision  why
cell.weight_ih     1 x 16 -> 192  12.0 KiB  float32
head.weight          1 x 64 -> 4     256 B  int8       error 1e-3

largest error against float64   engine    eager  engine/eager
y                              2.0e-07  4.0e-07         0.500
h                              3.0e-07        -             -"""


def test_a_full_report_shows_speed_floor_layers_and_errors() -> None:
    assert native_text(REPORT) == EXPECTED


def test_what_was_not_measured_is_said_or_left_out() -> None:
    bare = structs.replace(REPORT, python=None, native=None, floor_s=None, layers=(), errors={})

    assert native_text(bare).splitlines()[2:] == ["latency: not measured"]
    assert reached_fraction(bare) is None


def test_the_floor_is_held_against_python_where_c_was_not_measured() -> None:
    alone = structs.replace(REPORT, native=None)

    assert reached_fraction(alone) == REPORT.floor_s / alone.python.p50_s
    assert "42 % of that speed" in native_text(alone)


def test_reasons_have_no_column_where_no_layer_has_one() -> None:
    plain = structs.replace(REPORT, layers=REPORT.layers[:1])

    assert "why" not in native_text(plain)


def test_many_layers_are_counted() -> None:
    many = structs.replace(REPORT, layers=REPORT.layers[:1] * 50)

    assert "and 10 more" in native_text(many)


def test_what_is_faster_than_its_floor_has_none() -> None:
    text = native_text(structs.replace(REPORT, floor_s=5e-6))
    assert "% of that speed" not in text
    assert "no floor: reading its weights once takes 5.00 us" in text
