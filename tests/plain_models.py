"""Plain models as people write them, in any width: what is made smaller, adapted or quantised is tried on these.

Legend: B batch, T tokens or events, C channels, W width of the model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Plain(NamedTuple):
    """A model, inputs for one call, and how many of them, the last ones, are state that comes back with the outputs."""

    module: nn.Module
    inputs: tuple[Tensor, ...]
    num_state: int = 0


class Cnn(nn.Module):
    """Images [B, 1, 8, 8] to ten classes, with a residual block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU())
        self.inner = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1),
            nn.BatchNorm2d(width),
        )
        self.down, self.head = nn.Conv2d(width, 2 * width, 3, 2, 1), nn.Linear(2 * width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = F.relu(x + self.inner(x))
        return self.head(F.relu(self.down(x)).mean((2, 3)))


class Separable(nn.Module):
    """Depthwise and pointwise convolutions with group norm and skips that are concatenated."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, width, 3, padding=1)
        self.depth, self.norm = nn.Conv2d(width, width, 3, padding=1, groups=width), nn.GroupNorm(4, width)
        self.point = nn.Conv2d(width, 2 * width, 1)
        self.last, self.head = nn.Conv2d(3 * width, width, 3, 2, 1), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        y = self.point(F.silu(self.norm(self.depth(x))))
        return self.head(F.relu(self.last(torch.cat((x, F.relu(y)), 1))).amax((2, 3)))


class Gru(nn.Module):
    """A two-layer GRU over a sequence [B, T, 16]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.rnn, self.head = nn.GRU(16, width, num_layers=2, batch_first=True), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0][:, -1])


class GruStep(nn.Module):
    """A GRU cell with its state carried by the caller."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.into = nn.Linear(16, width)
        self.cell, self.head = nn.GRUCell(width, width), nn.Linear(width, 4)

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = self.cell(torch.tanh(self.into(x)), h)
        return self.head(h), h


class LstmStep(nn.Module):
    """Two LSTM cells, one above the other, with both states carried by the caller."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.low, self.high, self.head = nn.LSTMCell(16, width), nn.LSTMCell(width, width), nn.Linear(width, 4)

    def forward(self, x: Tensor, h: Tensor, c: Tensor, p: Tensor, q: Tensor) -> tuple[Tensor, ...]:
        h, c = self.low(x, (h, c))
        p, q = self.high(h, (p, q))
        return self.head(p), h, c, p, q


class Tcn(nn.Module):
    """Dilated causal convolutions with residuals over [B, 8, T]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.into = nn.Conv1d(8, width, 1)
        self.layers = nn.ModuleList(nn.Conv1d(width, width, 3, dilation=d) for d in (1, 2, 4))
        self.head = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x)
        for layer in self.layers:
            assert isinstance(layer, nn.Conv1d)
            x = x + F.relu(layer(F.pad(x, (2 * layer.dilation[0], 0))))
        return self.head(x[:, :, -1])


class Block(nn.Module):
    """Attention with heads cut by `view`, and a gated feed-forward."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_a, self.norm_f = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.gate, self.up, self.down = (
            nn.Linear(width, 3 * width),
            nn.Linear(width, 3 * width),
            nn.Linear(3 * width, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        size_b, size_t = x.shape[:2]
        q, k, v = self.qkv(self.norm_a(x)).chunk(3, -1)
        q, k, v = (z.view(size_b, size_t, self.heads, -1).transpose(1, 2) for z in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(size_b, size_t, -1)
        x = x + self.out(y)
        z = self.norm_f(x)
        return x + self.down(F.silu(self.gate(z)) * self.up(z))


class Transformer(nn.Module):
    """A causal language model over [B, T] tokens of a byte's size."""

    def __init__(self, width: int, heads: int = 4, blocks: int = 2, words: int = 64, length: int = 64) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(blocks)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        return self.head(self.norm(self.blocks(x)))


class Encoder(nn.Module):
    """torch's own encoder layers, whose attention is one module with its weights inside."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.into = nn.Linear(16, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, F.gelu, batch_first=True, norm_first=True)
        self.layers, self.head = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(self.into(x)).mean(1))


class UNet(nn.Module):
    """Two levels down and up, skips concatenated, over [B, 1, 16, 16]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.a, self.b, self.c = _conv(1, width), _conv(width, 2 * width), _conv(2 * width, 4 * width)
        self.up_b = nn.ConvTranspose2d(4 * width, 2 * width, 2, 2)
        self.up_a = nn.ConvTranspose2d(2 * width, width, 2, 2)
        self.d, self.e, self.head = _conv(4 * width, 2 * width), _conv(2 * width, width), nn.Conv2d(width, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = self.a(x)
        b = self.b(F.max_pool2d(a, 2))
        c = self.c(F.max_pool2d(b, 2))
        b = self.d(torch.cat((b, self.up_b(c)), 1))
        return self.head(self.e(torch.cat((a, self.up_a(b)), 1)))


def _conv(num_in: int, num_out: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(num_in, num_out, 3, padding=1), nn.GroupNorm(4, num_out), nn.SiLU())


def mlp(width: int = 64) -> Plain:
    layers = (
        nn.Linear(64, width),
        nn.GELU(),
        nn.LayerNorm(width),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, 10),
    )
    return Plain(nn.Sequential(*layers), (torch.randn(16, 64),))


def cnn(width: int = 16) -> Plain:
    return Plain(Cnn(width), (torch.randn(8, 1, 8, 8),))


def separable(width: int = 16) -> Plain:
    return Plain(Separable(width), (torch.randn(8, 1, 8, 8),))


def gru(width: int = 32) -> Plain:
    return Plain(Gru(width), (torch.randn(8, 12, 16),))


def gru_step(width: int = 32) -> Plain:
    return Plain(GruStep(width), (torch.randn(4, 16), torch.zeros(4, width)), num_state=1)


def lstm_step(width: int = 32) -> Plain:
    return Plain(LstmStep(width), (torch.randn(4, 16), *(torch.zeros(4, width) for _ in range(4))), num_state=4)


def tcn(width: int = 24) -> Plain:
    return Plain(Tcn(width), (torch.randn(4, 8, 32),))


def transformer(width: int = 32) -> Plain:
    return Plain(Transformer(width), (torch.randint(0, 64, (4, 24)),))


def encoder(width: int = 32) -> Plain:
    return Plain(Encoder(width), (torch.randn(4, 20, 16),))


def unet(width: int = 8) -> Plain:
    return Plain(UNet(width), (torch.randn(2, 1, 16, 16),))


PLAIN: dict[str, Callable[..., Plain]] = {
    "mlp": mlp,
    "cnn": cnn,
    "separable": separable,
    "gru": gru,
    "gru_step": gru_step,
    "lstm_step": lstm_step,
    "tcn": tcn,
    "transformer": transformer,
    "encoder": encoder,
    "unet": unet,
}


def plain(name: str, *, seed: int = 0, **options: Any) -> Plain:
    """The model and its inputs as this seed gives them; the global random state is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return PLAIN[name](**options)
