"""The structure that is told from a dense mask is the mask."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from flatout import masks
from flatout.blocks.kernels.attention.mask import Mask
from flatout.blocks.kernels.attention.recognition import recognised

S = 300
OFFSETS = [0, 40, 41, 170, S]
IDS = torch.stack([torch.arange(S) // 100, torch.arange(S) // 70])
STRUCTURES: dict[str, tuple[Mask, str]] = {
    "nothing hidden": (masks.everything(), "all-true"),
    "causal": (masks.causal(), "causal"),
    "window before": (masks.window(30), "window"),
    "window on both sides": (masks.window(30, 7), "window"),
    "all before and some after": (masks.window(None, 3), "window"),
    "documents": (masks.documents(OFFSETS), "documents"),
    "causal documents": (masks.documents(OFFSETS) & masks.causal(), "documents"),
    "documents of samples": (masks.documents(ids=IDS) & masks.causal(), "documents"),
    "only few": (masks.window(9) | masks.blocks(torch.eye(3, dtype=torch.bool), 100), "other"),
}


def as_scores(seen: Tensor) -> Tensor:
    return torch.zeros(seen.shape).masked_fill_(~seen, -torch.inf)


@pytest.mark.parametrize("is_added", [False, True])
@pytest.mark.parametrize("name", STRUCTURES)
def test_a_structure_is_told_and_is_the_mask(name: str, is_added: bool) -> None:
    mask, kind = STRUCTURES[name]
    seen = mask.dense(S, S)
    found = recognised(as_scores(seen) if is_added else seen)
    assert found.kind == kind
    assert found.share == pytest.approx(float(seen.float().mean()))
    assert (found.mask is None) == (kind == "other")
    if found.mask is not None:
        assert torch.equal(found.mask.dense(S, S).expand_as(seen), seen)


def test_few_blocks_in_any_order_are_looked_up_in_a_copy() -> None:
    layout = torch.zeros(8, 8, dtype=torch.bool)
    layout[range(8), [3, 1, 0, 6, 2, 7, 5, 4]] = True
    seen = layout.repeat_interleave(128, 0).repeat_interleave(128, 1)
    seen &= torch.rand(seen.shape, generator=torch.Generator().manual_seed(0)) < 0.7
    found, wanted = recognised(seen), seen.clone()
    seen.zero_()
    assert found.kind == "sparse"
    assert found.mask is not None
    assert torch.equal(found.mask.dense(1024, 1024)[0, 0], wanted)


def test_padding_biases_and_queries_that_see_nothing_have_no_structure() -> None:
    lengths = torch.tensor([S, 200])
    padding = (torch.arange(S) < lengths[:, None])[:, None, None, :].expand(2, 1, S, S)
    blind = torch.ones(S, S, dtype=torch.bool).tril()
    blind[5] = False
    for given_mask, kind in ((padding, "padding"), (torch.randn(S, S), "bias"), (blind, "other")):
        found = recognised(given_mask)
        assert (found.kind, found.mask) == (kind, None)


@given(st.data())
def test_whatever_is_told_is_the_mask_pair_for_pair(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 6))
    bits = data.draw(st.lists(st.booleans(), min_size=size * size, max_size=size * size))
    seen = torch.tensor(bits).view(size, size)
    found = recognised(seen)
    if found.mask is not None:
        assert torch.equal(found.mask.dense(size, size)[0, 0], seen)
