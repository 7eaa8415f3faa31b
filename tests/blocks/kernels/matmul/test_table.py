from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from flatout.blocks.kernels.matmul import dispatch, table
from flatout.blocks.kernels.matmul.problem import MatmulProblem, plain_problem
from flatout.blocks.kernels.matmul.table import MeasuredProblem, MeasuredVariant
from flatout.blocks.kernels.matmul.variant import Tile, Variant
from flatout.core.errors import RecordError
from flatout.machine.measure.stats import Estimate

CPU = torch.device("cpu")
TILED = Variant(name="triton", tile=Tile(m=64, n=64, k=64, stages=3, warps=4))


@pytest.fixture(autouse=True)
def folder(tmp_path: Path) -> Iterator[Path]:
    before = table.folder()
    table.keep_in(tmp_path)
    dispatch.forget()
    yield tmp_path
    table.keep_in(before)
    dispatch.forget()


def _problem(m: int = 16, is_constant: bool = False) -> MatmulProblem:
    return plain_problem(m, 24, 32, dtype=torch.float32, device=CPU, is_constant=is_constant)


def _estimate(value: float) -> Estimate:
    return Estimate(value=value, low=0.98 * value, high=1.02 * value, confidence=0.95, num_samples=11)


def _row(variant: Variant, call_s: float, device_s: float, *, vendor_s: float = 10e-6) -> MeasuredVariant:
    return MeasuredVariant(
        variant=variant,
        call=_estimate(call_s),
        device=_estimate(device_s),
        call_ratio=None if variant.name == "vendor" else _estimate(call_s / vendor_s),
        device_ratio=None if variant.name == "vendor" else _estimate(device_s / vendor_s),
        error=1e-3,
    )


def _measured(problem: MatmulProblem, *rows: MeasuredVariant) -> MeasuredProblem:
    return MeasuredProblem(
        problem=str(problem), flop=1.0, traffic_bytes=1.0, dtype="float32", rows=rows, measured_at="2026-11-22T00:00:00"
    )


VENDOR = _row(Variant(name="vendor"), 10e-6, 10e-6)


def test_what_was_not_measured_takes_the_vendor_and_how_to_measure_is_the_reason() -> None:
    selection = table.select_variant(_problem())
    assert selection.variant.name == "vendor"
    assert "not measured: run `flatout matmul --shapes 16x24x32`" in selection.because


def test_the_fastest_variant_is_taken_by_the_clock_that_counts() -> None:
    problem = _problem()
    table.add(CPU, _measured(problem, VENDOR, _row(TILED, 12e-6, 5e-6), _row(Variant(name="padded"), 8e-6, 8e-6)))
    assert table.select_variant(problem).variant.name == "padded"
    assert table.select_variant(problem, is_captured=True).variant == TILED


def test_a_variant_that_may_be_no_faster_is_not_taken() -> None:
    problem = _problem()
    table.add(CPU, _measured(problem, VENDOR, _row(TILED, 9.9e-6, 9.9e-6)))
    assert table.select_variant(problem) == (Variant(name="vendor"), "measured: nothing is faster for certain")


def test_the_table_is_read_again_by_another_process(folder: Path) -> None:
    problem = _problem()
    path = table.add(CPU, _measured(problem, VENDOR, _row(TILED, 5e-6, 5e-6)))
    assert path.parent == folder
    table.keep_in(folder)  # forgets what is in memory
    assert table.select_variant(problem).variant == TILED


def test_what_another_process_added_meanwhile_is_stored_too(folder: Path) -> None:
    table.device_table(CPU)
    before = table._tables.copy()
    table.add(CPU, _measured(_problem(1), VENDOR))
    table._tables.update(before)  # as in a process that has read before the other wrote
    table.add(CPU, _measured(_problem(2), VENDOR))
    table.keep_in(folder)
    assert set(table.device_table(CPU).entries) == {str(_problem(1)), str(_problem(2))}


def test_a_table_of_an_earlier_version_is_read() -> None:
    problem = _problem(is_constant=True)
    path = table.add(CPU, _measured(problem, VENDOR, _row(TILED, 5e-6, 5e-6)))
    path.write_text(path.read_text().replace('"variant"', '"way"').replace(" constant", " kept"))
    table.keep_in(path.parent)  # forgets what is in memory
    assert table.select_variant(problem).variant == TILED


def test_a_damaged_table_is_an_error_that_names_the_file() -> None:
    path = table.table_path(CPU)
    path.write_text("{")
    with pytest.raises(RecordError, match=r"damaged or from another version of flatout.*remove it"):
        table.select_variant(_problem())


@pytest.mark.parametrize(
    "other",
    [
        _problem(17),
        _problem(is_constant=True),
        _problem()._replace(a_stride=40),
        _problem()._replace(b_rows=False, b_stride=32),
        _problem()._replace(precision="float32"),
        _problem()._replace(out_dtype=torch.bfloat16),
        _problem()._replace(strides="any"),
        _problem()._replace(dtype=torch.float16),
    ],
    ids=str,
)
def test_problems_that_differ_have_keys_that_differ(other: MatmulProblem) -> None:
    assert str(other) != str(_problem())


@pytest.mark.slow
def test_measuring_fills_the_table_once_and_the_selection_comes_from_it() -> None:
    a, b = torch.randn(16, 32), torch.randn(32, 24)
    problem = _problem()
    with dispatch.measuring():
        dispatch.runner_of(problem)(a, b, None, None, None)
        first = table.device_table(CPU).entries[str(problem)]
        dispatch.runner_of(problem)(a, b, None, None, None)
    assert table.device_table(CPU).entries[str(problem)] is first
    assert first.rows[0].variant.name == "vendor"
    assert "GPUs" in first.refused["triton"]
    assert table.select_variant(problem).because.startswith("measured")


@pytest.mark.slow
def test_measuring_prepacks_a_constant_weight_and_leaves_random_numbers_alone() -> None:
    before = torch.random.get_rng_state()
    found = dispatch.measure_matmul(_problem(is_constant=True))
    assert [row.variant.name for row in found.rows] == ["vendor", "prepacked"]
    assert torch.equal(torch.random.get_rng_state(), before)


def test_nothing_is_measured_unasked() -> None:
    dispatch.runner_of(_problem())
    assert not table.device_table(CPU).entries
