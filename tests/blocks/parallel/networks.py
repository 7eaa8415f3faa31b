"""Plain models as people write them, for layouts."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flatout.blocks.parallel.experts import Experts

VOCAB, WIDTH, TOKENS = 64, 32, 16


class Attention(nn.Module):
    """With q, k and v in one layer, whose sizes the code takes from its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.qkv, self.proj, self.heads = nn.Linear(width, 3 * width), nn.Linear(width, width), heads

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.size()
        q, k, v = self.qkv(x).split(c, dim=2)
        q, k, v = (y.view(b, t, self.heads, c // self.heads).transpose(1, 2) for y in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).contiguous().view(b, t, c))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.ln1, self.attn, self.ln2 = nn.LayerNorm(width), Attention(width, heads), nn.LayerNorm(width)
        self.fc, self.out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln1(x))
        return x + self.out(F.gelu(self.fc(self.ln2(x))))


class GPT(nn.Module):
    """Learned positions, biases, the output layer is the embedding."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.tok, self.pos = nn.Embedding(VOCAB, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH, 4) for _ in range(layers))
        self.ln, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.tok.weight

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        x = self.tok(ids) + self.pos(positions)
        for block in self.blocks:
            x = block(x)
        return self.head(self.ln(x))


class GroupedAttention(nn.Module):
    def __init__(self, width: int, heads: int, groups: int) -> None:
        super().__init__()
        each = width // heads
        self.q, self.o = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.k, self.v = nn.Linear(width, groups * each, bias=False), nn.Linear(width, groups * each, bias=False)
        self.heads, self.groups, self.each = heads, groups, each

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        b, t, c = x.shape

        def heads(y: Tensor, num: int) -> Tensor:
            return y.view(b, t, num, self.each).transpose(1, 2)

        def rotated(y: Tensor) -> Tensor:
            first, second = y.chunk(2, -1)
            return torch.cat([first * cos - second * sin, first * sin + second * cos], -1)

        q, k = rotated(heads(self.q(x), self.heads)), rotated(heads(self.k(x), self.groups))
        y = F.scaled_dot_product_attention(q, k, heads(self.v(x), self.groups), is_causal=True, enable_gqa=True)
        return self.o(y.transpose(1, 2).reshape(b, t, c))


class GatedBlock(nn.Module):
    def __init__(self, width: int, heads: int, groups: int) -> None:
        super().__init__()
        self.n1, self.attn, self.n2 = nn.RMSNorm(width), GroupedAttention(width, heads, groups), nn.RMSNorm(width)
        self.gate, self.up = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, 3 * width, bias=False)
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attn(self.n1(x), cos, sin)
        h = self.n2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Llama(nn.Module):
    """Rotary positions from a buffer, grouped heads, gated products, the forward hands two tensors more to each block."""

    def __init__(self, layers: int = 4, groups: int = 2) -> None:
        super().__init__()
        self.tok = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(GatedBlock(WIDTH, 4, groups) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCAB + 1, bias=False)  # which no ranks divide
        each = WIDTH // 4
        self.register_buffer("rates", 1e4 ** -(torch.arange(0, each, 2) / each), persistent=False)

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        x = self.tok(ids)
        angles = positions[..., None] * self.rates
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.head(self.norm(x))


class ExpertBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.ln1, self.attn, self.ln2 = nn.LayerNorm(width), Attention(width, heads), nn.LayerNorm(width)
        self.experts = Experts(width, 2 * width, 4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln1(x))
        return x + self.experts(self.ln2(x))


class Mixture(nn.Module):
    """A mixture of experts."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.tok, self.pos = nn.Embedding(VOCAB, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(ExpertBlock(WIDTH, 4) for _ in range(layers))
        self.ln, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        x = self.tok(ids) + self.pos(positions)
        for block in self.blocks:
            x = block(x)
        return self.head(self.ln(x))


NETWORKS = {"gpt": GPT, "llama": Llama, "mixture": Mixture}


def batch_of(samples: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, positions, next tokens."""
    numbers = torch.Generator().manual_seed(1)
    ids = torch.randint(VOCAB, (samples, TOKENS), generator=numbers)
    target = torch.randint(VOCAB, (samples, TOKENS), generator=numbers)
    return ids, torch.arange(TOKENS).expand(samples, TOKENS).contiguous(), target


def loss_of(out: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(out.flatten(0, 1), target.flatten())
