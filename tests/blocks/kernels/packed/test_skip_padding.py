from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.profiler import profile

from flatout.blocks.kernels.packed.rows import gather_real, packed_rows, spread_real
from flatout.blocks.kernels.packed.skip_padding import skip_padding
from flatout.core.errors import UsageError

_WIDTH, _HEADS, _LONGEST = 32, 4, 24


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(_WIDTH, 3 * _WIDTH)
        self.out = nn.Linear(_WIDTH, _WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        B, T, C = x.shape
        q, k, v = (t.view(B, T, _HEADS, -1).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None, :])
        out: Tensor = self.out(y.transpose(1, 2).reshape(B, T, C))
        return out


class Encoder(nn.Module):
    """Post-norm layers, as BERT's; the first position is read."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(50, _WIDTH, padding_idx=0), nn.Embedding(_LONGEST, _WIDTH)
        self.attention, self.norm1, self.norm2 = Attention(), nn.LayerNorm(_WIDTH), nn.LayerNorm(_WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(_WIDTH, 64), nn.GELU(), nn.Dropout(dropout), nn.Linear(64, _WIDTH), nn.Dropout(dropout)
        )
        self.head = nn.Linear(_WIDTH, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        mask = tokens != 0
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        x = self.norm1(x + self.attention(x, mask))
        x = self.norm2(x + self.mlp(x))
        scores: Tensor = self.head(x[:, 0])
        return scores


class Gated(nn.Module):
    """Pre-norm layers with norms by hand and gates, a mean over real positions, two results."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(50, _WIDTH)
        self.places = nn.Parameter(torch.randn(1, _LONGEST, _WIDTH))
        self.scale = nn.Parameter(torch.ones(_WIDTH))
        self.attention, self.gate, self.down = Attention(), nn.Linear(_WIDTH, 96), nn.Linear(48, _WIDTH, bias=False)
        self.mixed, self.head = nn.Linear(2 * _WIDTH, _WIDTH), nn.Linear(_WIDTH, 5)

    def norm(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.scale

    def forward(self, tokens: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        x = self.token(tokens) * 5.0 + self.places[:, : tokens.shape[1]]
        x = x + self.attention(self.norm(x), mask)
        gate, up = self.gate(self.norm(x)).split(48, dim=2)
        x = x + self.down(F.silu(gate) * up)
        x = self.mixed(torch.cat([x, 1.0 - x.tanh()], dim=-1))
        x = torch.where(mask[:, :, None], x, -x)
        pooled = (x * mask.unsqueeze(-1)).sum(1) / mask.sum(1, keepdim=True)
        scores = self.head(x[..., :_WIDTH]).log_softmax(-1)
        return pooled, scores * mask[..., None]


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token, self.first, self.second = nn.Embedding(50, _WIDTH), nn.Linear(_WIDTH, 40), nn.Linear(40, 6)

    def forward(self, tokens: Tensor) -> Tensor:
        x = F.relu(self.first(self.token(tokens)), inplace=True)
        x = (x * 2.0).clone()
        x[:, 1:] += 1.0
        y = self.second(x)
        total: Tensor = (y * (tokens != 0)[..., None]).sum(1)
        return total


class MaskOfZeros(nn.Module):
    """A mask that is read off the embeddings, of which padding has zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.first, self.second = (
            nn.Embedding(50, _WIDTH, padding_idx=0),
            nn.Linear(_WIDTH, 40),
            nn.Linear(40, 6),
        )

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens)
        is_padding = x.abs().sum(-1) == 0
        y = self.second(F.gelu(self.first(x)))
        total: Tensor = y.masked_fill(is_padding.unsqueeze(-1), 0.0).sum(1) / (~is_padding).sum(1, keepdim=True)
        return total


def tokens_of(lengths: list[int], width: int = _LONGEST, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(1, 50, (len(lengths), width), generator=generator)
    return tokens * (torch.arange(width) < torch.tensor(lengths)[:, None])


def arguments(model: nn.Module, tokens: Tensor) -> tuple[Tensor, ...]:
    return (tokens, tokens != 0) if isinstance(model, Gated) else (tokens,)


def results(model: nn.Module, tokens: Tensor) -> list[Tensor]:
    model.zero_grad()
    torch.manual_seed(1)
    made = model(*arguments(model, tokens))
    outputs = made if isinstance(made, tuple) else (made,)
    sum(o.double().square().sum() for o in outputs).backward()
    return [o.detach() for o in outputs] + [p.grad for p in model.parameters() if p.grad is not None]


_MODELS = {
    "encoder": (Encoder, 4),
    "gated": (Gated, 6),
    "dropout": (lambda: Encoder(dropout=0.2), 4),
    "mask": (MaskOfZeros, 2),
}


@pytest.mark.parametrize(("make", "expected"), _MODELS.values(), ids=_MODELS)
def test_results_and_gradients_are_those_of_the_plain_model(
    make: type[nn.Module], expected: int, num_products: list[int | None]
) -> None:
    plain = make().double()
    packed = copy.deepcopy(plain)
    undo = skip_padding(packed, multiple=8, fused=False)
    for lengths in ([3, 24, 11, 5], [1, 2, 2, 9], [24, 24, 24, 24]):
        tokens = tokens_of(lengths)
        for one, other in zip(results(packed, tokens), results(plain, tokens), strict=True):
            torch.testing.assert_close(one, other)
    assert num_products == [expected]  # one graph for all numbers of rows
    undo()
    assert packed._compiled_call_impl is None


def test_what_is_changed_in_place_stays_padded(num_products: list[int | None]) -> None:
    plain = InPlace().double()
    packed = copy.deepcopy(plain)
    skip_padding(packed, multiple=8, fused=False)
    for one, other in zip(results(packed, tokens_of([4, 9])), results(plain, tokens_of([4, 9])), strict=True):
        torch.testing.assert_close(one, other)
    assert num_products == [1]


def test_widths_and_batches_may_change() -> None:
    plain = Encoder().double()
    packed = copy.deepcopy(plain)
    skip_padding(packed, multiple=4, fused=False)
    for width, lengths in ((24, [3, 20, 7]), (16, [16, 2, 9]), (12, [5, 5, 12]), (24, [1, 24]), (20, [20, 3, 3, 3, 8])):
        tokens = tokens_of(lengths, width)
        for one, other in zip(results(packed, tokens), results(plain, tokens), strict=True):
            torch.testing.assert_close(one, other)


def test_where_positions_and_heads_are_as_many_nothing_is_packed(num_products: list[int | None]) -> None:
    plain = Encoder().double()
    packed = copy.deepcopy(plain)
    skip_padding(packed, multiple=4, fused=False)
    tokens = tokens_of([1, 4, 3], _HEADS)
    with pytest.warns(UserWarning, match="leaves no padding out"):
        packed(tokens)
    for one, other in zip(results(packed, tokens), results(plain, tokens), strict=True):
        torch.testing.assert_close(one, other)
    assert num_products == [0]


def test_products_are_of_real_tokens_alone() -> None:
    plain = Encoder()
    packed = copy.deepcopy(plain)
    skip_padding(packed, multiple=4, fused=False)
    tokens = tokens_of([3, 4, 5, 4] * 4)
    flops = []
    for model in (packed, plain):
        model(tokens)
        with profile(record_shapes=True) as found:
            model(tokens).sum().backward()
        products = [e for e in found.events() if e.name in ("aten::mm", "aten::addmm")]
        shapes = [[s for s in e.input_shapes if len(s) == 2][-2:] for e in products]
        flops.append(sum(2 * m * k * n for (m, k), (_, n) in shapes))
    assert flops[0] == pytest.approx(flops[1] * 64 / (16 * _LONGEST), rel=0.02)


def test_a_batch_of_padding_alone_and_a_call_without_tokens_are_computed() -> None:
    plain = nn.Sequential(nn.Embedding(50, _WIDTH), nn.Linear(_WIDTH, 3))
    packed = copy.deepcopy(plain)
    skip_padding(packed, multiple=8, fused=False)
    assert torch.equal(packed(tokens_of([0, 0])), torch.zeros(2, _LONGEST, 3))
    line = torch.arange(5)
    assert torch.equal(packed(line), plain(line))


@pytest.mark.slow
@pytest.mark.parametrize(("make", "has_autocast"), [(Gated, False), (Encoder, True)], ids=["float32", "autocast"])
def test_compiled_by_inductor_too(make: type[nn.Module], has_autocast: bool) -> None:
    plain = make()
    packed = copy.deepcopy(plain)
    skip_padding(packed, multiple=8)
    for lengths in ([3, 24, 11, 5], [1, 2, 2, 9]):
        with torch.autocast("cpu", torch.bfloat16, enabled=has_autocast):
            pairs = zip(results(packed, tokens_of(lengths)), results(plain, tokens_of(lengths)), strict=True)
        for one, other in pairs:
            error = (one.double() - other.double()).norm() / other.double().norm().clamp_min(1e-9)
            assert error < (0.05 if has_autocast else 1e-5)


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.integers(0, 6), min_size=1, max_size=5),
    st.integers(1, 9),
    st.integers(1, 7),
)
def test_rows_come_back_where_they_were(lengths: list[int], multiple: int, width_of_row: int) -> None:
    tokens = tokens_of(lengths, 6)
    index, inverse, _ = packed_rows(tokens, pad=0, multiple=multiple)
    assert len(index) % multiple == 0
    assert 0 < len(index) < sum(lengths) + multiple + 1
    x = torch.randn(*tokens.shape, width_of_row, dtype=torch.float64, requires_grad=True)
    rows = gather_real(x, index, inverse)
    assert torch.equal(rows[: sum(lengths)], x[tokens != 0])
    back = spread_real(rows, index, inverse)
    assert torch.equal(back, x * (tokens != 0)[..., None])
    (gradient,) = torch.autograd.grad(back.square().sum(), x)
    torch.testing.assert_close(gradient, 2 * x.detach() * (tokens != 0)[..., None])


def test_gradients_can_be_differentiated_again() -> None:
    index, inverse, _ = packed_rows(tokens_of([2, 0, 3], 4), pad=0, multiple=4)
    x = torch.randn(3, 4, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda x: spread_real(gather_real(x, index, inverse).sin(), index, inverse), x)


def test_what_cannot_be_is_an_error() -> None:
    model = Encoder()
    with pytest.raises(UsageError, match="multiple 0"):
        skip_padding(model, multiple=0)
    model.compile(backend="eager")
    with pytest.raises(UsageError, match="compiled already"):
        skip_padding(model)


class TorchEncoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(_WIDTH, _HEADS, 64, batch_first=True)
        self.token, self.head = nn.Embedding(50, _WIDTH), nn.Linear(_WIDTH, 5)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, tokens: Tensor) -> Tensor:
        padding = tokens == 0
        x = self.layers(self.token(tokens), src_key_padding_mask=padding)
        total: Tensor = self.head(x.masked_fill(padding[..., None], 0.0).sum(1) / (~padding).sum(1, keepdim=True))
        return total


def test_torchs_own_encoder_packs_its_mlps_and_draws_the_same_dropout(num_products: list[int | None]) -> None:
    plain = TorchEncoder().double()
    packed = copy.deepcopy(plain)
    skip_padding(packed, multiple=8, fused=False)
    for lengths in ([3, 9, 20, 2], [5, 1, 1, 7]):
        for one, other in zip(results(packed, tokens_of(lengths)), results(plain, tokens_of(lengths)), strict=True):
            torch.testing.assert_close(one, other)
    assert num_products == [4]


@pytest.mark.slow
def test_all_products_of_the_bert_of_transformers_are_packed(num_products: list[int | None]) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": _WIDTH, "num_hidden_layers": 2, "num_attention_heads": _HEADS, "intermediate_size": 64}
    config = transformers.BertConfig(vocab_size=50, max_position_embeddings=_LONGEST, **sizes)
    plain = transformers.BertForSequenceClassification(config).double()
    packed = copy.deepcopy(plain)
    skip_padding(packed, multiple=8, fused=False)
    for lengths in ([3, 9, 20, 2], [5, 1, 1, 7]):
        tokens = tokens_of(lengths)
        pairs = []
        for model in (packed, plain):
            model.zero_grad()
            torch.manual_seed(1)
            made = model(input_ids=tokens, attention_mask=(tokens != 0).long(), labels=torch.tensor([0, 1, 0, 1]))
            made.loss.backward()
            pairs.append([made.logits.detach(), *(p.grad for p in model.parameters())])
        for one, other in zip(*pairs, strict=True):
            torch.testing.assert_close(one, other)
    assert num_products[0] == 12  # queries, keys, values, outputs and both products of the MLP, of two layers
