"""A plain decoder-only transformer of given sizes, as the planner counts one: to measure layouts on, and to check them with."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flatout.parallel.experts import Experts
from flatout.records.scale import ModelShape

# B batch, T tokens, C hidden, N heads, H numbers of a head


class Sized(nn.Module):
    """ids_BT, positions_BT -> logits. RMS norms, rotary positions, no biases, no dropout; experts where the sizes have any."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocab, shape.hidden)
        self.blocks = nn.ModuleList(_Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden)
        self.head = nn.Linear(shape.hidden, shape.vocab, bias=False)
        if shape.is_tied:
            self.head.weight = self.embedding.weight
        for weight in (self.embedding.weight, self.head.weight):
            nn.init.normal_(weight, std=shape.hidden**-0.5)
        self.rates: Tensor
        rates = 1e4 ** -(torch.arange(0, shape.head_width, 2) / shape.head_width)
        self.register_buffer("rates", rates, persistent=False)

    def forward(self, ids_BT: Tensor, positions_BT: Tensor) -> Tensor:
        x_BTC = self.embedding(ids_BT)
        angles = positions_BT[:, None, :, None] * self.rates
        cos, sin = angles.cos().to(x_BTC.dtype), angles.sin().to(x_BTC.dtype)
        for block in self.blocks:
            x_BTC = block(x_BTC, cos, sin)
        logits: Tensor = self.head(self.norm(x_BTC))
        return logits


def loss_of(logits: Tensor, target_BT: Tensor) -> Tensor:
    """The mean cross-entropy, in float32."""
    return F.cross_entropy(logits.flatten(0, 1).float(), target_BT.flatten())


class _Block(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(shape.hidden), nn.RMSNorm(shape.hidden)
        self.attention = _Attention(shape)
        if shape.num_experts > 1:
            self.feed: nn.Module = Experts(
                shape.hidden, shape.inner, shape.num_experts, shape.experts_per_token, is_gated=shape.is_gated
            )
        else:
            self.feed = _Gated(shape) if shape.is_gated else _Plain(shape)

    def forward(self, x_BTC: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x_BTC = x_BTC + self.attention(self.norm1(x_BTC), cos, sin)
        out: Tensor = x_BTC + self.feed(self.norm2(x_BTC))
        return out


class _Attention(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        keys = shape.key_heads * shape.head_width
        self.query = nn.Linear(shape.hidden, shape.hidden, bias=False)
        self.key, self.value = nn.Linear(shape.hidden, keys, bias=False), nn.Linear(shape.hidden, keys, bias=False)
        self.out = nn.Linear(shape.hidden, shape.hidden, bias=False)
        self._width, self._is_grouped = shape.head_width, shape.key_heads < shape.heads

    def forward(self, x_BTC: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        b, t, _ = x_BTC.shape

        def heads(y: Tensor) -> Tensor:
            return y.view(b, t, -1, self._width).transpose(1, 2)

        def turned(y: Tensor) -> Tensor:
            first, second = y.chunk(2, -1)
            return torch.cat([first * cos - second * sin, first * sin + second * cos], -1)

        q_BNTH, k_BNTH = turned(heads(self.query(x_BTC))), turned(heads(self.key(x_BTC)))
        v_BNTH = heads(self.value(x_BTC))
        y_BNTH = F.scaled_dot_product_attention(q_BNTH, k_BNTH, v_BNTH, is_causal=True, enable_gqa=self._is_grouped)
        out: Tensor = self.out(y_BNTH.transpose(1, 2).reshape(b, t, -1))
        return out


class _Plain(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.up = nn.Linear(shape.hidden, shape.inner, bias=False)
        self.down = nn.Linear(shape.inner, shape.hidden, bias=False)

    def forward(self, x_BTC: Tensor) -> Tensor:
        out: Tensor = self.down(F.gelu(self.up(x_BTC)))
        return out


class _Gated(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.hidden, shape.inner, bias=False)
        self.up = nn.Linear(shape.hidden, shape.inner, bias=False)
        self.down = nn.Linear(shape.inner, shape.hidden, bias=False)

    def forward(self, x_BTC: Tensor) -> Tensor:
        out: Tensor = self.down(F.silu(self.gate(x_BTC)) * self.up(x_BTC))
        return out
