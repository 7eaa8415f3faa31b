"""What only a GPU shows: bfloat16, programs that wait for each other, captured graphs, streams."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from msgspec import structs
from tests.blocks.kernels.against_float64 import on_device
from torch import Tensor

from flatout.blocks.kernels.matmul import Packed, dispatch, matmul, plain_problem, table
from flatout.blocks.kernels.matmul import triton as tiled
from flatout.blocks.kernels.matmul.implementation import bound, variants_of
from flatout.blocks.kernels.matmul.problem import matmul_problem
from flatout.blocks.kernels.matmul.table import MeasuredProblem, MeasuredVariant
from flatout.blocks.kernels.matmul.variant import Tile, Variant
from flatout.machine.measure.stats import Estimate

pytestmark = [pytest.mark.device, on_device]
MEETING = Tile(m=64, n=64, k=64, stages=3, warps=4, splits=16, is_single=True)


def _deep() -> tuple[Tensor, Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    a = torch.randn(100, 8192, generator=generator, device="cuda").bfloat16()
    return a, torch.randn(8192, 120, generator=generator, device="cuda").bfloat16()


@pytest.mark.parametrize("loads", ["descriptor", "pointer"])
def test_parts_that_meet_in_one_launch_add_up_as_in_two(loads: str) -> None:
    a, b = _deep()
    one = structs.replace(MEETING, loads=loads)
    problem = matmul_problem(a, b)
    run = tiled.bind(problem, one)
    wanted = tiled.bind(problem, structs.replace(one, is_single=False))(a, b, None, None, None)
    for _ in range(200):
        assert torch.equal(run(a, b, None, None, None), wanted)


def test_parts_that_meet_do_so_in_captured_graphs_and_on_several_streams_at_once() -> None:
    a, b = _deep()
    run = tiled.bind(matmul_problem(a, b), MEETING)
    wanted = run(a, b, None, None, None)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [run(a, b, None, None, None) for _ in range(300)]  # more than there are counters in store
    streams = [torch.cuda.Stream() for _ in range(3)]
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream())
    beside = []
    for _ in range(20):
        graph.replay()
        for stream in streams:
            with torch.cuda.stream(stream):
                beside.append(run(a, b, None, None, None))
    for stream in streams:
        torch.cuda.current_stream().wait_stream(stream)
    assert all(torch.equal(out, wanted) for out in (*outs, *beside))


def test_threads_that_share_a_stream_do_not_share_the_parts_of_two_launches() -> None:
    a, b = _deep()
    run = tiled.bind(matmul_problem(a, b), structs.replace(MEETING, is_single=False))
    wanted = run(a, b, None, None, None)
    with ThreadPoolExecutor(4) as pool:
        outs = list(pool.map(lambda _: run(a, b, None, None, None), range(400)))
    assert all(torch.equal(out, wanted) for out in outs)


def _ratio(value: float) -> Estimate:
    return Estimate(value=value, low=value, high=value, confidence=0.99, num_samples=9)


def test_a_graph_finds_the_copy_of_a_weight_that_its_variant_wants() -> None:
    a, b = torch.randn(17, 1001, device="cuda").bfloat16(), torch.randn(1001, 515, device="cuda").bfloat16()
    packed, exact = Packed(b), a.double() @ b.double()
    problem = plain_problem(17, 515, 1001, dtype=torch.bfloat16, device="cuda", is_constant=True)
    vendor = MeasuredVariant(variant=Variant(name="vendor"), call=_ratio(1e-5), device=_ratio(1e-5), error=0.0)
    padded = MeasuredVariant(
        variant=Variant(name="padded", unit=8), call_ratio=_ratio(2.0), device_ratio=_ratio(0.5), error=0.0
    )
    padded = structs.replace(padded, call=_ratio(2e-5), device=_ratio(5e-6))
    rows = (vendor, padded)
    words = str(problem)
    table.add(
        problem.device,
        MeasuredProblem(problem=words, flop=1.0, traffic_bytes=1.0, dtype="bfloat16", rows=rows, measured_at=""),
    )
    dispatch.forget()
    with torch.no_grad():
        matmul(a, packed)  # by the vendor's library
        assert packed.extra_bytes > 0
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = matmul(a, packed)
    b.data.zero_()  # past torch's count: a copy that a replay made would be of this
    graph.replay()
    assert float((captured.double() - exact).norm()) <= 1e-2 * float(exact.norm())


@pytest.mark.parametrize("kind", ["normal", "uniform", "wide"])
@pytest.mark.parametrize("layout", ["nn", "nt", "tn"])
def test_float32_from_coarser_products_errs_no_more_than_the_library_may(kind: str, layout: str) -> None:
    generator = torch.Generator("cuda").manual_seed(0)

    def numbers(rows: int, columns: int, by_rows: bool) -> Tensor:
        shape = (rows, columns) if by_rows else (columns, rows)
        x = torch.randn(shape, generator=generator, device="cuda")
        x = {"normal": x, "uniform": x.erf().abs(), "wide": torch.exp(8 * x) * x.roll(1).sign()}[kind]
        return x if by_rows else x.T

    a, b = numbers(512, 2048, layout[0] == "n"), numbers(2048, 384, layout[1] == "n")
    problem = matmul_problem(a, b, precision="float32")
    exact, sizes = a.double() @ b.double(), a.double().abs() @ b.double().abs()

    def worst(out: Tensor) -> float:
        return float(((out.double() - exact).abs() / sizes).max())

    variants = variants_of(problem).variants
    assert {variant.name for variant in variants} >= {"vendor", "float16x3", "bfloat16x6"}
    library = worst(bound(problem, variants[0])(a, b, None, None, None))
    for variant in variants[1:]:
        assert worst(bound(problem, variant)(a, b, None, None, None)) <= 2 * library, str(variant)


def test_what_is_measured_is_taken_and_right() -> None:
    a, b = torch.randn(300, 1001, device="cuda").bfloat16(), torch.randn(1001, 515, device="cuda").bfloat16()
    problem = plain_problem(300, 515, 1001, dtype=torch.bfloat16, device="cuda", is_constant=True)
    found = dispatch.measure_matmul(problem)
    assert {row.variant.name for row in found.rows} >= {"vendor", "padded", "triton"}
    assert not [why for why in found.refused.values() if why.startswith("wrong")]
    packed, exact = Packed(b), a.double() @ b.double()
    out = matmul(a, packed)
    assert float((out.double() - exact).norm()) <= 2 * float(((a @ b).double() - exact).norm())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = matmul(a, packed)
    graph.replay()
    assert float((captured.double() - exact).norm()) <= 2 * float(((a @ b).double() - exact).norm())


def test_a_copy_of_a_weight_is_not_cached_from_a_graph_that_has_not_run() -> None:
    b = torch.randn(64, 100, device="cuda").bfloat16()
    packed = Packed(b)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        packed.copy("a", torch.clone)
    copy = packed.copy("a", torch.clone)
    assert isinstance(copy, Tensor)
    assert torch.equal(copy, b)
