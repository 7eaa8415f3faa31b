"""Bytes of tensors without NumPy: those that it gives, of the memory itself."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from flatout.core.tensors.host_bytes import host_bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool])
def test_they_are_the_bytes_of_the_numbers_in_order(dtype: torch.dtype) -> None:
    tensor = torch.randint(0, 2, (3, 5)).to(dtype)
    assert bytes(host_bytes(tensor)) == bytes(tensor.reshape(-1).view(torch.uint8).tolist())


def test_a_part_begins_where_it_lies() -> None:
    tensor = torch.arange(10)
    assert bytes(host_bytes(tensor[4:6])) == (4).to_bytes(8, "little") + (5).to_bytes(8, "little")


def test_nothing_has_no_bytes() -> None:
    assert bytes(host_bytes(torch.empty(0, 3))) == b""


def test_a_storage_can_still_be_resized() -> None:
    tensor = torch.ones(4)
    host_bytes(tensor)
    tensor.untyped_storage().resize_(0)
    assert tensor.untyped_storage().nbytes() == 0


def test_what_is_elsewhere_or_in_pieces_is_refused() -> None:
    with pytest.raises(ValueError, match="on 'meta' has no bytes"):
        host_bytes(torch.empty(3, device="meta"))
    with pytest.raises(ValueError, match="in one piece"):
        host_bytes(torch.ones(3, 4).T)


def test_the_view_keeps_its_tensor_alive() -> None:
    tensor = torch.ones(4)
    alive = weakref.ref(tensor)
    view = host_bytes(tensor)
    del tensor
    gc.collect()
    assert alive() is not None and bytes(view[:4]) == b"\x00\x00\x80\x3f"
    del view
    gc.collect()
    assert alive() is None
