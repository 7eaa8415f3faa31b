from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import torch
from tests.check.traces.kineto_builder import Kineto, training
from torch.profiler import ProfilerActivity, profile

from flatout.check.traces.kineto import read_trace
from flatout.check.traces.ranks import evidence_of_files
from flatout.core.errors import RecordError


def test_a_trace_is_read_with_what_it_has_of_the_device(tmp_path: Path) -> None:
    trace = read_trace(training(rank=1, world_size=2).write(tmp_path / "a.json"))
    assert (trace.rank, trace.world_size, trace.backend) == (1, 2, "nccl")
    assert trace.devices[0].num_sms == 132
    assert (len(trace.work), trace.has_shapes, trace.has_stacks) == (15, True, True)
    assert trace.notes == []


def test_packed_and_plain_are_the_same(tmp_path: Path) -> None:
    plain = read_trace(training().write(tmp_path / "a.json"))
    packed = read_trace(training().write(tmp_path / "a.json.gz"))
    assert (plain.work, plain.calls, plain.operators) == (packed.work, packed.calls, packed.operators)


def test_numbers_that_are_no_json_and_broken_text_are_survived(tmp_path: Path) -> None:
    text = training().text().replace('"queued": 0', '"queued": inf', 1).replace('"bytes": 4096', '"bytes": nan', 1)
    path = tmp_path / "a.json"
    path.write_bytes(text.encode().replace(b"train.py(7)", b"tr\xffin.py(7)", 1))
    assert len(read_trace(path).work) == 12


def test_a_strange_event_is_left_out_alone(tmp_path: Path) -> None:
    kineto = training()
    kineto.events.insert(3, {"ph": "X", "cat": "kernel", "name": "odd", "ts": "when", "args": {"grid": "none"}})
    trace = read_trace(kineto.write(tmp_path / "a.json"))
    assert len(trace.work) == 12
    assert trace.devices[0].name == "NVIDIA H200"


@pytest.mark.parametrize("share", [0.3, 0.6, 0.99])
def test_a_trace_cut_off_is_read_as_far_as_it_goes(tmp_path: Path, share: float) -> None:
    text = training().text()
    path = tmp_path / "a.json"
    path.write_text(text[: int(share * len(text))])
    trace = read_trace(path)
    assert trace.operators
    assert ["cut off" in n for n in trace.notes] == [True]


def test_a_packed_trace_cut_off_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    data = gzip.compress(training(steps=60).text().encode())
    path = tmp_path / "a.json.gz"
    path.write_bytes(data[: len(data) // 2])
    trace = read_trace(path)
    assert trace.work
    assert any("cut off" in n for n in trace.notes)


def test_a_bare_list_of_events_is_a_trace_too(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps(training().events))
    assert len(read_trace(path).work) == 12


@pytest.mark.parametrize(
    ("name", "data", "says"),
    [
        ("a.json", b'{"a": 1}', "neither 'traceEvents' nor 'evidence'"),
        ("a.json", b"hello", "no trace of torch.profiler"),
        ("a.json", b"", "no trace of torch.profiler"),
        ("a.json", b'{"traceEvents": []}', "0 events"),
        ("a.json", b'{"traceEvents": [{"ph": "X", "cat": "v8", "name": "gc", "ts": 1}]}', "none of torch.profiler"),
        ("a.json", b'{"traceEvents": 5}', "damaged"),
        ("a.json", b'{"traceEvents": [!!!]}', "damaged"),
        ("a.json.gz", b"\x1f\x8bnonsense-and-more", "no readable gzip"),
    ],
)
def test_what_is_no_trace_is_refused_with_a_reason(tmp_path: Path, name: str, data: bytes, says: str) -> None:
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(RecordError, match=says):
        read_trace(path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="cannot read"):
        read_trace(tmp_path / "none.json")


def test_shapes_of_lists_of_tensors_are_read_one_by_one(tmp_path: Path) -> None:
    kineto = Kineto()
    dims = {"Input Dims": [[[2, 3], [4, 3]], []], "Input type": ["TensorList", "Scalar"]}
    kineto.host("aten::cat", 0, 5, **dims)
    [operator] = read_trace(kineto.write(tmp_path / "a.json")).operators
    assert operator.shapes == ((2, 3), (4, 3))


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int16, torch.int8,
        torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool, torch.complex64, torch.complex128, torch.float8_e4m3fn,
        torch.float8_e5m2, torch.float8_e8m0fnu,
    ],
)  # fmt: skip
def test_tensors_of_each_dtype_have_their_shape_and_bytes(tmp_path: Path, dtype: torch.dtype) -> None:
    tensor = torch.empty(3, 5, dtype=dtype)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        tensor.clone()
    path = tmp_path / "trace.json"
    profiler.export_chrome_trace(str(path))

    [operator] = [o for o in read_trace(path).operators if o.name == "aten::clone"]
    assert (operator.shapes, operator.dtypes) == (((3, 5),), (str(dtype).removeprefix("torch."),))
    [row] = [o for o in evidence_of_files([path]).operators if o.op == "aten.clone"]
    assert row.bytes == tensor.nbytes


def test_attention_has_the_flop_of_its_heads_and_lengths(tmp_path: Path) -> None:
    q, k, v = (torch.ones(2, heads, length, 16) for heads, length in ((4, 6), (2, 10), (2, 10)))
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    path = tmp_path / "trace.json"
    profiler.export_chrome_trace(str(path))

    [row] = [o for o in evidence_of_files([path]).operators if o.op == "aten.scaled_dot_product_attention"]
    assert row.flop == 2 * (2 * 2 * 4 * 6 * 10 * 16)


def test_products_of_float8_have_their_flop(tmp_path: Path) -> None:
    one = torch.ones(())
    a, b = torch.ones(32, 64).to(torch.float8_e5m2), torch.ones(48, 64).to(torch.float8_e4m3fn).t()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        torch._scaled_mm(a, b, one, one, out_dtype=torch.bfloat16)
    path = tmp_path / "trace.json"
    profiler.export_chrome_trace(str(path))

    [row] = [o for o in evidence_of_files([path]).operators if o.op == "aten._scaled_mm"]
    assert row.flop == 2 * 32 * 64 * 48
