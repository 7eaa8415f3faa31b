"""Copies in memory: what was written comes back; what is torn or changed is never taken for whole."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from flatout.blocks.elastic.memory_slots import MemorySlot, first_difference, index_of, read_copy, saved_sums, sums_of
from flatout.blocks.training.checkpoint_parts import read_state, split_state
from flatout.core.errors import CheckpointError

JOB = "j" * 32


def _parts() -> dict[str, Any]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 1))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    net(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    return {"net": net, "optimizer": optimizer, "data": {"restart": 2, "order": (1, 2.5, None)}}


def _written(path: Path, step: int = 7) -> tuple[MemorySlot, int]:
    slot = MemorySlot(path)
    taken = split_state(_parts(), 0)
    return slot, slot.write(step, JOB, (0, 1), taken)


def test_what_was_written_is_what_is_read(tmp_path: Path) -> None:
    parts = _parts()
    _written(tmp_path / "slot")
    copy = read_copy(tmp_path / "slot")
    index = index_of({0: copy})
    live = split_state(parts, 0)
    assert (copy.head.step, copy.head.job, index.num_ranks) == (7, JOB, 1)
    assert first_difference(saved_sums(index, parts, 0, live.tensors), sums_of(live)) is None

    def fetch(name: str, chunk: object, there: tuple[slice, ...]) -> Tensor:
        return copy.tensor(name)[there] if there else copy.tensor(name)

    loadable = {name: parts[name] for name in ("net", "optimizer")}
    loaded = read_state(index, loadable, "here", fetch, rank=0, num_ranks=1)
    assert torch.equal(loaded.states["net"]["0.weight"], parts["net"][0].weight)
    assert torch.equal(loaded.random_numbers["torch"], torch.get_rng_state())


@pytest.mark.slow
@settings(max_examples=60)
@given(share=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_a_copy_with_any_bit_changed_is_not_whole(
    share: float, bit: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "flipped"
    _, size = _written(path)
    at = int(share * size)
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ (1 << bit)]))
    if 96 <= at < 4096 or _is_padding(path, at):
        return  # nothing is kept there
    with pytest.raises(CheckpointError, match=r"torn|damaged"):
        read_copy(path)


def _is_padding(path: Path, at: int) -> bool:
    """Between two tensors, where nothing is kept."""
    pristine = path.with_name("pristine")
    _written(pristine)
    held = read_copy(pristine).meta.tensors.values()
    begins = [(h.at, h.at + getattr(torch, h.dtype).itemsize * torch.Size(h.shape).numel()) for h in held]
    return at < read_copy(pristine).head.meta_at and not any(low <= at < high for low, high in begins)


def test_a_copy_that_is_being_written_is_not_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slot, _ = _written(tmp_path / "slot")
    copied, calls = MemorySlot._copied, []

    def dies(self: MemorySlot, *args: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return copied(self, *args)

    monkeypatch.setattr(MemorySlot, "_copied", dies)
    taken = split_state(_parts(), 0)
    with pytest.raises(KeyboardInterrupt):
        slot.write(8, JOB, (0, 1), taken)
    assert slot.head is None
    with pytest.raises(CheckpointError, match="torn"):
        read_copy(tmp_path / "slot")


def test_a_larger_state_makes_the_file_larger_and_keeps_nothing_of_the_old(tmp_path: Path) -> None:
    slot, _ = _written(tmp_path / "slot")
    taken = split_state({"large": {"x": torch.arange(100_000)}}, 0)
    slot.write(9, JOB, (0, 1), taken)
    copy = read_copy(tmp_path / "slot")
    assert copy.head.step == 9
    assert torch.equal(copy.tensor("large/x"), torch.arange(100_000))


def test_without_room_a_copy_is_an_error_and_not_a_crash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(CheckpointError, match=r"no room for a copy of .* MiB: No space left on device; give"):
        _written(tmp_path / "slot")


@pytest.mark.parametrize("shape", [(0,), (), (1,), (3, 0)])
def test_tensors_of_any_shape_come_back(tmp_path: Path, shape: tuple[int, ...]) -> None:
    taken = split_state({"x": {"t": torch.ones(shape, dtype=torch.bool)}}, 0)
    MemorySlot(tmp_path / "slot").write(1, JOB, (0, 1), taken)
    assert torch.equal(read_copy(tmp_path / "slot").tensor("x/t"), torch.ones(shape, dtype=torch.bool))
