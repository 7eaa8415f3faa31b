from __future__ import annotations

from importlib import import_module

import pytest
import torch
from tests.blocks.kernels.interpreted import interpreted
from torch import Tensor

from flatout.blocks.kernels.matmul.packing import Packed, has_aligned_rows, repacked
from flatout.blocks.kernels.matmul.padding import with_aligned_rows


class Copies:
    """Makes a copy, and counts."""

    def __init__(self) -> None:
        self.num = 0

    def __call__(self, matrix: Tensor) -> Tensor:
        self.num += 1
        return matrix.clone()


def test_a_repacked_matrix_has_zeros_around_it() -> None:
    x = torch.randn(3, 5)
    wide = repacked(x, rows=4, columns=6, stride=8)
    assert wide.stride() == (8, 1)
    assert torch.equal(wide[:3, :5], x)
    assert not wide[:3, 5:].any()
    assert not wide[3:].any()


def test_the_kernel_that_repacks_does_the_same() -> None:
    x, wide = torch.randn(3, 7)[:, :5], torch.full((4, 8), float("nan"))
    with interpreted():
        kernel = import_module("flatout.blocks.kernels.matmul.on_device.product").repack
        kernel[(4, 2, 1)](x, wide, 3, 5, 7, 4, 8, 4)
    assert torch.equal(wide[:3, :5], x)
    assert not wide[:3, 5:].any()
    assert not wide[3:].any()


@pytest.mark.parametrize("by_rows", [True, False])
def test_aligned_rows_are_used_as_they_are_and_others_copied(by_rows: bool) -> None:
    well, badly = torch.randn(8, 16), torch.randn(8, 15)
    if not by_rows:
        well, badly = well.T, badly.T
    aligned = with_aligned_rows(well, by_rows=by_rows, rows=well.shape[0], columns=well.shape[1], unit=4)
    moved = with_aligned_rows(badly, by_rows=by_rows, rows=badly.shape[0], columns=badly.shape[1], unit=4)
    assert aligned.data_ptr() == well.data_ptr()
    assert torch.equal(moved, badly)
    assert has_aligned_rows(moved if by_rows else moved.T)


def test_copies_are_cached_until_the_matrix_changes() -> None:
    weight, make = torch.randn(4, 4), Copies()
    packed = Packed(weight)
    first = packed.copy("a", make)
    assert packed.copy("a", make) is first
    weight.add_(1.0)
    assert torch.equal(packed.copy("a", make), weight)  # type: ignore[arg-type]
    assert make.num == 2


def test_a_step_of_an_optimizer_makes_copies_anew() -> None:
    weight, make = torch.nn.Parameter(torch.randn(4, 4)), Copies()
    packed = Packed(weight, is_transposed=True)
    packed.copy("a", make)
    weight.grad = torch.ones(4, 4)
    torch.optim.SGD([weight], lr=0.5).step()
    assert torch.equal(packed.copy("a", make), weight.detach().T)  # type: ignore[arg-type]


def test_another_storage_makes_copies_anew() -> None:
    weight, make = torch.nn.Parameter(torch.randn(4, 4)), Copies()
    packed = Packed(weight)
    packed.copy("a", make)
    weight.data = torch.zeros(4, 4)
    assert torch.equal(packed.copy("a", make), torch.zeros(4, 4))  # type: ignore[arg-type]


def test_what_the_count_of_changes_misses_needs_to_be_forgotten() -> None:
    weight, make = torch.zeros(4, 4), Copies()
    packed = Packed(weight)
    packed.copy("a", make)
    weight.data.add_(1.0)
    assert torch.equal(packed.copy("a", make), torch.zeros(4, 4))  # type: ignore[arg-type]
    packed.forget()
    assert torch.equal(packed.copy("a", make), weight)  # type: ignore[arg-type]


def test_extra_bytes_counts_each_storage_once() -> None:
    packed = Packed(torch.randn(4, 4))

    def halves(matrix: Tensor) -> tuple[Tensor, Tensor]:
        whole = torch.stack([matrix, matrix])
        return whole[0], whole[1]

    assert packed.extra_bytes == 0
    packed.copy("halves", halves)
    assert packed.extra_bytes == 2 * 4 * 4 * 4


def test_a_matrix_of_inference_mode_can_be_packed() -> None:
    with torch.inference_mode():
        packed = Packed(torch.ones(2, 2))
        assert torch.equal(packed.copy("a", Copies()), torch.ones(2, 2))  # type: ignore[arg-type]


def test_the_gradient_goes_through_the_matrix_while_gradients_are_recorded() -> None:
    weight = torch.nn.Parameter(torch.randn(3, 4))
    packed = Packed(weight, is_transposed=True)
    assert packed.matrix.shape == (4, 3)
    assert packed.matrix.requires_grad
    with torch.no_grad():
        assert not packed.matrix.requires_grad
