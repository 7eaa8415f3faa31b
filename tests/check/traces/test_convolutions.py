"""Results and FLOP of convolutions in traces that torch.profiler writes here, beside what PyTorch makes and counts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from tests.check.traces.kineto_builder import Kineto
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from flatout.check.traces.convolutions import convolved
from flatout.check.traces.kineto import read_trace
from flatout.check.traces.ranks import evidence_of_files
from flatout.core.records.evidence import Evidence


class Case(NamedTuple):
    layer: nn.Module
    size: tuple[int, ...]
    needs_grad: bool = True


CASES = {
    "1 d": Case(nn.Conv1d(4, 6, 3, stride=2, padding=1), (2, 4, 15)),
    "2 d": Case(nn.Conv2d(4, 6, (3, 5), stride=(1, 2), padding=(2, 0), dilation=(2, 1)), (2, 4, 12, 13)),
    "3 d": Case(nn.Conv3d(4, 6, 3, bias=False), (1, 4, 6, 7, 8)),
    "same": Case(nn.Conv2d(4, 6, 3, padding="same"), (2, 4, 9, 9)),
    "no sample": Case(nn.Conv2d(4, 6, 3, padding=1), (4, 9, 9)),
    "of data": Case(nn.Conv2d(4, 6, 3), (2, 4, 9, 9), needs_grad=False),
    "transposed": Case(
        nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1, dilation=(1, 2)), (2, 4, 7, 8)
    ),
    "transposed 1 d": Case(nn.ConvTranspose1d(4, 6, 4, stride=3), (2, 4, 7)),
}


def traced(case: Case, path: Path) -> tuple[Evidence, torch.Tensor, int]:
    """Evidence of the trace of forward and backward, the result, and the FLOP that PyTorch counts."""
    x = torch.randn(case.size, requires_grad=case.needs_grad)
    with FlopCounterMode(display=False) as counter:
        case.layer(x).sum().backward()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        out = case.layer(x)
        out.sum().backward()
    profiler.export_chrome_trace(str(path))
    return evidence_of_files([path]), out, counter.get_total_flops()


@pytest.mark.parametrize("name", CASES)
def test_flop_of_convolutions_are_those_that_pytorch_counts(tmp_path: Path, name: str) -> None:
    evidence, out, flop = traced(CASES[name], tmp_path / "trace.json")

    assert sum(o.num_calls * o.flop for o in evidence.operators) == flop
    made = [o for o in evidence.operators if "conv" in o.op and "backward" not in o.op and o.flop]
    assert [[t.shape for t in o.outputs] for o in made] == [[tuple(out.shape)]]
    assert not any("convolutions" in note for note in evidence.notes)


def test_each_array_of_a_convolution_counts_once_in_its_bytes(tmp_path: Path) -> None:
    evidence, out, _ = traced(Case(nn.Conv2d(4, 6, 3, bias=False), (2, 4, 9, 9)), tmp_path / "trace.json")
    rows = {o.op: o for o in evidence.operators}
    x, weight = 2 * 4 * 9 * 9, 6 * 4 * 3 * 3

    assert rows["aten.conv2d"].bytes == 4 * (x + weight + out.numel())
    assert rows["aten.convolution_backward"].bytes == 4 * (out.numel() + 2 * (x + weight))


def test_groups_divide_the_flop_of_a_convolution(tmp_path: Path) -> None:
    evidence, _, _ = traced(Case(nn.ConvTranspose2d(8, 12, 3, groups=4), (2, 8, 5, 5)), tmp_path / "trace.json")

    forward = 2 * 2 * 5 * 5 * (8 * 3 * 3 * 3)
    found = {o.op: (o.flop, [t.shape for t in o.outputs]) for o in evidence.operators if o.flop}
    assert found["aten.conv_transpose2d"] == (forward, [(2, 12, 7, 7)])
    assert found["aten.convolution_backward"] == (2 * forward, [(2, 8, 5, 5), (8, 3, 3, 3), (12,)])


def test_a_compiled_convolution_of_cudnn_has_its_numbers_in_another_order() -> None:
    values = ("", "", "[1, 2]", "[2, 1]", "[1, 1]", "1", "True", "False", "True")

    made = convolved("aten::cudnn_convolution", [(2, 4, 8, 8), (6, 4, 3, 3)], values)

    assert made.out_shapes == ((2, 6, 4, 10),)


@pytest.mark.parametrize(
    "values",
    [
        [],
        ["", "", "", "[1, 1]"],
        ["", "", "", "[0, 0]", "[1, 1]", "[1, 1]", "1"],
        ["", "", "", "x", "{}", "[null]", "1"],
    ],
)
def test_a_trace_without_the_numbers_has_a_row_without_flop_and_says_so(tmp_path: Path, values: Sequence[str]) -> None:
    kineto = Kineto(has_device=False)
    arguments: dict[str, Any] = {"Input Dims": [[2, 3, 8, 8], [4, 3, 3, 3]], "Input type": ["float", "float"]}
    kineto.step(1, 0, 100)
    kineto.host("aten::conv2d", 10, 50, **arguments, **{"Concrete Inputs": list(values)})
    kineto.host("aten::convolution", 20, 30, **arguments)
    path = kineto.write(tmp_path / "trace.json")

    [operator, _] = read_trace(path).operators
    assert operator.convolved.out_shapes == ()
    evidence = evidence_of_files([path])
    assert [(o.op, o.flop, o.num_calls) for o in evidence.operators] == [("aten.conv2d", 0, 1)]
    assert any("no FLOP for some convolutions" in note for note in evidence.notes)
