"""Block lists: the sets that torch finds by looking at every pair, without doing so."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.blocks.kernels.attention.drawn import compositions
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

from flatout import UsageError, masks
from flatout.blocks.kernels.attention.blocks import BlockLists, block_lists
from flatout.blocks.kernels.attention.flex import bits_mod, block_mask
from flatout.blocks.kernels.attention.mask import Mask
from flatout.blocks.kernels.attention.structures import Documents


def dense(num: Tensor, index: Tensor, cols: int) -> Tensor:
    """(B, H, R, C), bool, from lists as FlexAttention has them."""
    there = torch.zeros(*index.shape[:3], cols + 1, dtype=torch.bool)
    valid = torch.arange(index.size(3)) < num.unsqueeze(-1)
    return there.scatter_(3, torch.where(valid, index.long(), cols), True)[..., :cols]


def of_lists(lists: BlockLists) -> tuple[Tensor, Tensor]:
    """Partial and full blocks."""
    shape = (lists.batch, lists.heads, lists.num_rows, lists.num_cols)
    place = lists.row * lists.num_cols + lists.col
    both = torch.zeros(2, lists.batch * lists.heads * lists.num_rows * lists.num_cols, dtype=torch.bool)
    both[0, place[~lists.is_full]] = True
    both[1, place[lists.is_full]] = True
    return both[0].view(shape), both[1].view(shape)


def of_torch(mask: Mask, queries: int, keys: int, block: int) -> tuple[Tensor, Tensor]:
    theirs = create_block_mask(mask.mod(), mask.batch, mask.heads, queries, keys, device="cpu", BLOCK_SIZE=block)
    cols = -(-keys // block)
    assert theirs.full_kv_num_blocks is not None and theirs.full_kv_indices is not None
    return (
        dense(theirs.kv_num_blocks, theirs.kv_indices, cols),
        dense(theirs.full_kv_num_blocks, theirs.full_kv_indices, cols),
    )


@st.composite
def cases(draw: st.DrawFn) -> tuple[Mask, int, int, int]:
    queries = draw(st.integers(1, 60))
    keys = draw(st.just(queries) | st.integers(1, 60))
    return draw(compositions(queries, keys)), queries, keys, draw(st.sampled_from([4, 8, 16]))


@pytest.mark.slow
@given(cases())
@settings(max_examples=200)
@pytest.mark.long
def test_block_sets_are_those_of_create_block_mask(case: tuple[Mask, int, int, int]) -> None:
    mask, queries, keys, block = case

    lists = block_lists(mask, queries, keys, block=block)

    partial, full = of_lists(lists)
    expected = of_torch(mask, queries, keys, block)
    assert torch.equal(partial, expected[0]), mask
    assert torch.equal(full, expected[1]), mask
    place = lists.row * lists.num_cols + lists.col
    assert bool((place.diff() > 0).all())


@pytest.mark.slow
@given(cases())
@settings(max_examples=40)
def test_both_sides_of_the_block_mask_agree_and_are_no_wider_than_needed(case: tuple[Mask, int, int, int]) -> None:
    mask, queries, keys, block = case
    lists = block_lists(mask, queries, keys, block=block)

    made = block_mask(lists, mask.mod(), torch.device("cpu"))

    for by_row, by_col in (("kv", "q"), ("full_kv", "full_q")):
        rows = dense(getattr(made, f"{by_row}_num_blocks"), getattr(made, f"{by_row}_indices"), lists.num_cols)
        cols = dense(getattr(made, f"{by_col}_num_blocks"), getattr(made, f"{by_col}_indices"), lists.num_rows)
        assert torch.equal(rows, cols.transpose(2, 3))
        longest = max(int(made.kv_num_blocks.max()), int(made.full_kv_num_blocks.max()))
        assert getattr(made, f"{by_row}_indices").size(3) < max(3, 2 * longest)
    assert torch.equal(dense(made.kv_num_blocks, made.kv_indices, lists.num_cols), of_lists(lists)[0])
    assert made.seq_lengths == (queries, keys)


@pytest.mark.parametrize("block", [1, 2, 16, 128])
@pytest.mark.parametrize("mask", [masks.causal(), masks.everything()], ids=str)
def test_blocks_that_are_said_to_be_contiguous_are_at_all_whole_lengths(mask: Mask, block: int) -> None:
    assert mask.has_contiguous_blocks
    for queries, keys in ((1, 1), (3, 5), (5, 3), (4, 4), (8, 1)):
        lists = block_lists(mask, queries * block, keys * block, block=block)
        for sets in of_lists(lists):
            for line in (*sets[0, 0], *sets[0, 0].T):
                places = line.nonzero().flatten().tolist()
                assert places == list(range(places[0], places[-1] + 1)) if places else True


def test_blocks_of_other_masks_are_not_said_to_be_contiguous() -> None:
    offsets = torch.tensor([0, 100, 300])
    for mask in (masks.window(200), masks.causal() & masks.documents(offsets), masks.causal() | masks.sinks(4)):
        assert not mask.has_contiguous_blocks


@pytest.mark.slow
@given(cases())
@settings(max_examples=40)
def test_a_mask_given_as_bits_is_the_same_mask_in_its_partial_blocks(case: tuple[Mask, int, int, int]) -> None:
    mask, queries, keys, _ = case
    lists = block_lists(mask, queries, keys, block=32)
    index = [torch.arange(n) for n in (mask.batch, mask.heads, queries, keys)]
    b, h, q, kv = (i.view([-1 if d == at else 1 for d in range(4)]) for at, i in enumerate(index))

    seen = bits_mod(mask, lists, torch.device("cpu"))(b, h, q, kv)

    is_partial = of_lists(lists)[0].repeat_interleave(32, dim=2).repeat_interleave(32, dim=3)[:, :, :queries, :keys]
    assert torch.equal(seen & is_partial, mask.dense(queries, keys) & is_partial)


def test_a_million_tokens_of_packed_documents_need_no_pairs() -> None:
    tokens = 1 << 20
    lengths = torch.randint(200, 3000, (3000,), generator=torch.Generator().manual_seed(0))
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0).clamp(max=tokens)])

    lists = block_lists(masks.documents(offsets) & masks.causal() & masks.window(4096), tokens, tokens)

    # a document of n tokens touches at most (n / 128 + 2)^2 / 2 + ... blocks; never a row times a column of 8192
    assert 8192 <= lists.row.numel() < 40 * 8192
    assert bool((lists.col <= lists.row).all())


def test_a_tree_whose_ancestors_lie_in_very_many_pieces_is_looked_at_block_by_block() -> None:
    tokens = 600
    zigzag = masks.tree(
        [max(-1, i - 2) for i in range(tokens)]
    )  # two paths, one through the odd and one through the even

    lists = block_lists(zigzag, tokens, tokens, block=16)

    expected = of_torch(zigzag, tokens, tokens, 16)
    assert torch.equal(of_lists(lists)[0], expected[0]) and torch.equal(of_lists(lists)[1], expected[1])


def test_a_tree_may_name_parents_that_come_later() -> None:
    tree = masks.tree([2, 0, -1, 1])

    assert tree.dense(4, 4)[0, 0].int().tolist() == [[1, 0, 1, 0], [1, 1, 1, 0], [0, 0, 1, 0], [1, 1, 1, 1]]


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda: masks.tree([1, 0]), "its own ancestor"),
        (lambda: masks.tree([5]), "from -1"),
        (lambda: masks.documents([1, 4]), "begin with 0"),
        (lambda: masks.documents([0, 4, 2]), "never fall"),
        (masks.documents, "offsets of documents or"),
        (lambda: masks.documents(ids=torch.zeros(3)), "give integers"),
        (lambda: masks.window(-1), "left is -1"),
        (lambda: masks.window(torch.zeros(3)), "(1 or B, 1 or H)"),
        (lambda: masks.prefix(torch.zeros(3)), "(1 or B, 1 or H)"),
        (lambda: masks.dilated(0), "step is 0"),
        (lambda: masks.blocks(torch.zeros(2, 2), 4), "give bool"),
        (lambda: masks.global_tokens(torch.zeros(2)), "give bool"),
        (lambda: masks.graph(torch.tensor([0, 2]), torch.tensor([0])), "rise from 0"),
        (lambda: masks.graph(torch.tensor([0, 1]), torch.tensor([7])), "lie between 7 and 7"),
        (lambda: masks.causal() & 3, "is no mask"),
        (lambda: masks.per_head([masks.causal()] * 2) & masks.per_head([masks.causal()] * 3), "cannot be joined"),
        (lambda: masks.per_head([masks.per_head([masks.causal()] * 2)]), "stacked by heads"),
    ],
)
def test_what_is_no_mask_is_refused_in_words(make: object, what: str) -> None:
    with pytest.raises(UsageError, match=what.replace("(", r"\(").replace(")", r"\)")):
        make()  # type: ignore[operator]


@pytest.mark.parametrize(
    ("mask", "what"),
    [
        (masks.documents([0, 4, 9]), "9 tokens"),
        (masks.tree([-1, 0]), "2 tokens"),
        (masks.graph(torch.tensor([0, 0, 0]), torch.tensor([], dtype=torch.int64)), "2 queries and 2 keys"),
        (masks.global_tokens(torch.ones(3, dtype=torch.bool)), "3 tokens"),
        (masks.causal() | masks.blocks(torch.ones(2, 2, dtype=torch.bool), 3), "2 squares of 3"),
    ],
)
def test_a_mask_for_other_lengths_is_refused(mask: Mask, what: str) -> None:
    with pytest.raises(UsageError, match=what):
        block_lists(mask, 10, 10)


@given(st.data())
def test_documents_of_samples_begin_where_numbers_change_or_do_not_lie_in_rows(data: st.DataObject) -> None:
    samples, length = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 12))
    is_sorted = data.draw(st.booleans())
    drawn = [data.draw(st.lists(st.integers(0, 3), min_size=length, max_size=length)) for _ in range(samples)]
    rows = [sorted(row) if is_sorted else row for row in drawn]
    mask = masks.documents(ids=torch.tensor(rows))
    assert isinstance(mask, Documents)
    begins = [[place for place in range(length) if place == 0 or row[place] != row[place - 1]] for row in rows]
    is_in_rows = all(len(set(row)) == len(each) for row, each in zip(rows, begins, strict=True))
    assert mask.is_in_rows == is_in_rows
    if is_in_rows:
        flat = [sample * length + place for sample, each in enumerate(begins) for place in each]
        assert mask.starts(samples).tolist() == flat
        if samples == 1:
            twice = mask.starts(2).tolist()
            assert twice == flat + [place + length for place in flat]
            assert masks.documents(ids=torch.tensor(rows[0])).starts(2).tolist() == twice
