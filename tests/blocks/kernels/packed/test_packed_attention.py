"""Attention of packed rows, and in which graphs it is taken: where the mask hides the padding and nothing else."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from flatout.blocks.kernels.packed.attention import attention_of_rows
from flatout.blocks.kernels.packed.rows import offsets_of, packed_rows
from flatout.blocks.kernels.packed.skip_padding import skip_padding

WIDTH, HEADS, T, END = 32, 4, 24, 40
gpu = [pytest.mark.device, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
DEVICES = ["cpu", pytest.param("cuda", marks=gpu)]


def tokens_of(lengths: list[int], *, is_before: bool = False) -> Tensor:
    tokens = torch.randint(1, 50, (len(lengths), T), generator=torch.Generator().manual_seed(0))
    tokens[:, 2] = END
    tokens = tokens * (torch.arange(T) < torch.tensor(lengths)[:, None])
    return tokens.flip(1) if is_before else tokens


class Model(nn.Module):
    """One layer of attention under a mask that a function makes of the tokens, [B, T]."""

    def __init__(self, mask: Callable[..., Tensor | None], **options: object) -> None:
        super().__init__()
        self.mask, self.options = mask, options
        self.token, self.bias = nn.Embedding(50, WIDTH), nn.Parameter(torch.zeros(1, HEADS, T, T))
        self.query, self.keys, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, 5)

    def forward(self, tokens: Tensor, *others: Tensor) -> Tensor:
        x = self.token(tokens)
        B = len(x)
        q = self.query(x).view(B, T, HEADS, -1).permute(0, 2, 1, 3)
        k, v = (t.view(B, T, HEADS, -1).transpose(1, 2).contiguous() for t in self.keys(x).chunk(2, dim=-1))
        mask = self.mask(tokens, *others)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **self.options)  # type: ignore[arg-type]
        scores: Tensor = self.out(y.transpose(1, 2).reshape(B, T, WIDTH))
        return scores * (tokens != 0)[..., None]


def is_real(tokens: Tensor) -> Tensor:
    return (tokens != 0)[:, None, None, :]


def added(tokens: Tensor) -> Tensor:
    return torch.zeros_like(tokens, dtype=torch.float64).masked_fill(tokens == 0, -1e4)[:, None, None, :]


def added_in_16_bits(tokens: Tensor) -> Tensor:
    return added(tokens).bfloat16().double()


def added_by_arithmetic(tokens: Tensor) -> Tensor:
    return (1.0 - (tokens != 0).double())[:, None, None] * torch.finfo(torch.float64).min


def of_pairs(tokens: Tensor) -> Tensor:
    return (tokens != 0)[:, None, None, :].expand(-1, HEADS, T, -1)


def before(tokens: Tensor) -> Tensor:
    return is_real(tokens) & torch.ones(T, T, dtype=torch.bool).tril()


def from_argument(tokens: Tensor, mask: Tensor) -> Tensor:
    return mask[:, None, None, :].bool()


def documents(tokens: Tensor) -> Tensor:
    """Each ends with a certain token."""
    number = (tokens == END).cumsum(1)
    return is_real(tokens) & (number[:, None, :, None] == number[:, None, None, :])


def segments(tokens: Tensor, number: Tensor) -> Tensor:
    return is_real(tokens) & (number[:, None, :, None] == number[:, None, None, :])


def nearby(tokens: Tensor) -> Tensor:
    place = torch.arange(T)
    return is_real(tokens) & ((place[:, None] - place[None, :]).abs() < 9)


def first_alone(tokens: Tensor) -> Tensor:
    return (torch.arange(T) == 0).expand(len(tokens), 1, 1, T)


def first_lengths(tokens: Tensor) -> Tensor:
    """The same where padding lies behind, and something else where not."""
    return (torch.arange(T) < (tokens != 0).sum(1, keepdim=True))[:, None, None, :]


def by_hundreds(tokens: Tensor) -> Tensor:
    """Of numbers that are not named: token 41 and its like are hidden."""
    return is_real(tokens) & (tokens * 25 // 1025 != 1)[:, None, None, :]


def nothing(tokens: Tensor) -> None:
    return None


def drawn(tokens: Tensor) -> Tensor:
    return is_real(tokens) & (torch.rand(T) < 2)


def results(model: nn.Module, *arguments: Tensor) -> list[Tensor]:
    model.zero_grad()
    torch.manual_seed(1)
    out = model(*arguments)
    out.square().sum().backward()
    return [out.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def assert_as_plain(model: nn.Module, *batches: tuple[Tensor, ...]) -> None:
    plain = model.double()
    packed = copy.deepcopy(plain)
    skip_padding(packed, multiple=8, fused=False)
    for arguments in batches:
        expected = results(plain, *arguments)
        for one, other in zip(results(packed, *arguments), expected, strict=True):
            torch.testing.assert_close(one, other)


BATCHES = [(tokens_of([3, 24, 11, 5]),), (tokens_of([3, 24, 1, 5], is_before=True),), (tokens_of([24, 24, 24, 24]),)]


@pytest.mark.parametrize(
    "mask", [is_real, added, added_in_16_bits, added_by_arithmetic, of_pairs, before], ids=lambda m: m.__name__
)
def test_a_mask_of_padding_packs_attention(mask: Callable[..., Tensor], graphs: list[list[str]]) -> None:
    assert_as_plain(Model(mask, scale=0.2), *BATCHES)
    assert len(graphs) == 2  # of padding behind and elsewhere
    for names in graphs:
        assert "attention_of_rows" in names and "scaled_dot_product_attention" not in names
        assert sum(name.startswith("spread_real") for name in names) == 1  # of the result


@pytest.mark.parametrize(
    "mask", [documents, by_hundreds, nearby, first_alone, first_lengths, drawn], ids=lambda m: m.__name__
)
def test_other_masks_leave_attention_padded(mask: Callable[..., Tensor], graphs: list[list[str]]) -> None:
    assert_as_plain(Model(mask), *BATCHES[::2])
    assert "scaled_dot_product_attention" in graphs[0] and "attention_of_rows" not in graphs[0]


@pytest.mark.parametrize("is_learnt", [False, True])
def test_attention_to_padding_stays_padded(is_learnt: bool, graphs: list[list[str]]) -> None:
    model = Model(nothing)
    if is_learnt:
        model.mask = lambda tokens: model.bias
    skip_padding(model, multiple=8, fused=False)
    model(tokens_of([3, 24, 11, 5]))
    assert "scaled_dot_product_attention" in graphs[0] and "attention_of_rows" not in graphs[0]


def test_dropout_of_attention_leaves_it_padded(graphs: list[list[str]]) -> None:
    assert_as_plain(Model(is_real, dropout_p=0.3), *BATCHES)
    assert "scaled_dot_product_attention" in graphs[0]


def test_a_mask_among_the_arguments_is_one_of_padding_where_its_numbers_say_so(graphs: list[list[str]]) -> None:
    tokens = tokens_of([3, 24, 11, 5])
    real = (tokens != 0).long()
    fewer = real * (torch.arange(T) != 1)
    assert_as_plain(Model(from_argument), (tokens, real), (tokens, fewer), (tokens, real))
    assert ["attention_of_rows" in names for names in graphs] == [True, False]
    assert not any("labelled" in name for names in graphs for name in names)
    graphs.clear()
    assert_as_plain(Model(segments), (tokens, real * (1 + torch.arange(T) // 10)))
    assert "attention_of_rows" not in graphs[0]


def test_causal_attention_is_packed_where_padding_lies_behind(graphs: list[list[str]]) -> None:
    model = Model(nothing, is_causal=True)
    behind, before = (tokens_of([3, 24, 11, 5], is_before=is_before) for is_before in (False, True))
    assert_as_plain(model, (behind,), (behind.flip(0),))
    model(before)
    packed = copy.deepcopy(model)
    skip_padding(packed, multiple=8, fused=False)
    packed(before)
    assert ["attention_of_rows" in names for names in graphs] == [True, False]


def test_looking_at_a_mask_draws_no_random_numbers() -> None:
    model = Model(drawn)
    skip_padding(model, multiple=8, fused=False)
    torch.manual_seed(3)
    model(tokens_of([3, 5]))
    after = torch.rand(())
    torch.manual_seed(3)
    torch.rand(T)
    assert torch.equal(after, torch.rand(()))


@pytest.mark.slow
def test_the_bert_of_transformers_packs_attention(graphs: list[list[str]]) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": HEADS, "intermediate_size": 64}
    config = transformers.BertConfig(
        vocab_size=50, max_position_embeddings=T, attention_probs_dropout_prob=0.0, **sizes
    )
    plain = transformers.BertForSequenceClassification(config).double()
    packed = copy.deepcopy(plain)
    skip_padding(packed, multiple=8, fused=False)
    for lengths in ([3, 9, 20, 2], [5, 1, 1, 7]):
        tokens = tokens_of(lengths)
        pairs = []
        for model in (packed, plain):
            model.zero_grad()
            torch.manual_seed(1)
            given = {"attention_mask": (tokens != 0).long(), "labels": torch.tensor([0, 1, 0, 1])}
            made = model(input_ids=tokens, **given)
            made.loss.backward()
            pairs.append([made.logits.detach(), *(p.grad for p in model.parameters())])
        for one, other in zip(*pairs, strict=True):
            torch.testing.assert_close(one, other)
    assert sum(name.startswith("attention_of_rows") for name in graphs[0]) == 2


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("key_heads", [4, 2])
def test_rows_are_attended_as_float64_says(device: str, is_compiled: bool, is_causal: bool, key_heads: int) -> None:
    index, inverse, _ = packed_rows(tokens_of([3, 24, 0, 11, 5]).to(device), pad=0, multiple=16)
    offsets, generator = offsets_of(inverse), torch.Generator().manual_seed(2)
    dtype = torch.float64 if device == "cpu" else torch.bfloat16
    q, k, v = (
        torch.randn(len(index), heads, 16, generator=generator, dtype=torch.float64).to(device, dtype).requires_grad_()
        for heads in (4, key_heads, key_heads)
    )
    attend = torch.compile(attention_of_rows, fullgraph=True, backend="aot_eager") if is_compiled else attention_of_rows
    out = attend(q, k, v, index, offsets, T, is_causal, 0.3)
    sample = torch.where(index >= 0, index // T, -1)
    seen = sample[:, None] == sample[None, :]
    seen = seen.tril() if is_causal else seen
    wide = [t.detach().double().requires_grad_() for t in (q, k, v)]
    heads_first = [t.transpose(0, 1)[None] for t in wide]
    exact = F.scaled_dot_product_attention(*heads_first, seen, scale=0.3, enable_gqa=True)[0].transpose(0, 1)
    exact = exact.masked_fill((index < 0)[:, None, None], 0)
    weights = torch.randn(out.shape, generator=generator, dtype=torch.float64).to(device)
    pairs = zip(
        (out, *torch.autograd.grad((out * weights).sum(), (q, k, v))),
        (exact, *torch.autograd.grad((exact * weights).sum(), wide)),
        strict=True,
    )
    for ours, theirs in pairs:
        assert bool(ours.isfinite().all())
        assert float((ours.double() - theirs).detach().norm()) <= (1e-10 if device == "cpu" else 2e-2) * float(
            theirs.detach().norm()
        )


@given(st.lists(st.integers(0, T), min_size=1, max_size=5))
def test_offsets_are_those_of_the_rows(lengths: list[int]) -> None:
    index, inverse, is_trailing = packed_rows(tokens_of(lengths), pad=0, multiple=4)
    assert is_trailing
    offsets = offsets_of(inverse).tolist()
    assert offsets[0] == 0 and offsets[-1] == sum(lengths)
    for sample, (start, end) in enumerate(pairwise(offsets)):
        assert index[start:end].tolist() == [sample * T + place for place in range(lengths[sample])]
