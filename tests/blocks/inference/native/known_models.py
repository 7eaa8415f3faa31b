"""Models that are looked at from all sides: six of the shapes that people run, and one that uses nearly all operators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flatout.blocks.inference.native.library import Generated
from flatout.blocks.inference.native.program import Program


class Gru(nn.Module):
    def __init__(self, n: int = 32) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(8, n), nn.Linear(n, 1)

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = self.cell(x, h)
        return self.head(h), h


class Lstm(nn.Module):
    def __init__(self, n: int = 33) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTMCell(8, n), nn.Linear(n, 3)

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h, c = self.cell(x, (h, c))
        return self.head(h), h, c


class Tcn(nn.Module):
    """Two causal convolutions over windows that are carried."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Conv1d(4, 17, 3), nn.Conv1d(17, 17, 3, dilation=2), nn.Conv1d(17, 1, 1)

    def forward(self, x: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        a = torch.cat((a[:, :, 1:], x), 2)
        b = torch.cat((b[:, :, 1:], F.gelu(self.first(a))), 2)
        return self.head(torch.relu(self.second(b))), a, b


class Windowed(nn.Module):
    """A transformer over a window of events that gives the newest token's output alone."""

    def __init__(self, length: int = 9, width: int = 16, blocks: int = 2) -> None:
        super().__init__()
        self.into = nn.Linear(5, width)
        self.place = nn.Parameter(torch.randn(length, width))
        layers = [
            nn.TransformerEncoderLayer(width, 2, 40, 0.0, F.gelu, batch_first=True, norm_first=True)
            for _ in range(blocks)
        ]
        self.layers, self.head = nn.ModuleList(layers), nn.Linear(width, 2)

    def forward(self, x: Tensor, window: Tensor) -> tuple[Tensor, Tensor]:
        window = torch.cat((window[:, 1:], self.into(x)[:, None]), 1)
        y = window + self.place
        for layer in self.layers:
            y = layer(y)
        return self.head(y[:, -1]), window


class Book(nn.Module):
    """Whole numbers, a table, a mask, a reduction, an attention, a counter that is changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.rnn = nn.Embedding(11, 12), nn.GRU(12, 7, batch_first=True, bidirectional=True)
        self.mix = nn.MultiheadAttention(14, 2, batch_first=True)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, k: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        self.seen.add_(1)  # type: ignore[operator]
        y = self.rnn(self.table(k) * (k > 2)[..., None])[0]
        y = self.mix(y, y, y, need_weights=False)[0]
        y = y.masked_fill(y > 0.3, -1.0) + x.mean(-1, keepdim=True)
        return torch.log_softmax(y, 1), y.argmax(-1), self.seen / (1 + self.seen)  # type: ignore[operator]


class Everything(nn.Module):
    """Every function of scalar.h and rows.h that a graph can ask for."""

    def __init__(self) -> None:
        super().__init__()
        self.gru, self.norm, self.table = nn.GRUCell(33, 17), nn.LayerNorm(33), nn.Embedding(5, 33)
        self.conv, self.deep = nn.Conv1d(3, 5, 2), nn.Conv1d(3, 3, 2, groups=3)
        self.few, self.wide = nn.Linear(33, 2), nn.Linear(33, 70)

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, ...]:
        h = self.gru(self.norm(x), h)
        y = x.view(1, 3, 11)
        at = (x[0, :3] * 2).long().clamp(0, 4)
        functions = (
            torch.exp,
            torch.sigmoid,
            torch.tanh,
            torch.erf,
            torch.sin,
            torch.cos,
            torch.atan,
            F.silu,
            F.mish,
            F.gelu,
            F.hardsigmoid,
            F.hardswish,
            F.softplus,
            F.elu,
            torch.expm1,
            torch.log1p,
            torch.log,
            torch.log2,
            torch.log10,
            torch.exp2,
            torch.sqrt,
            torch.rsqrt,
            torch.sinh,
            torch.cosh,
            torch.floor,
            torch.round,
            torch.sign,
            torch.reciprocal,
            lambda x: x**1.7,
            lambda x: torch.fmod(x, 0.7),
            lambda x: torch.remainder(x, -0.7),
            F.leaky_relu,
            lambda x: F.gelu(x, approximate="tanh"),
            lambda x: x.clamp(-1, 1),
            lambda x: torch.where(x > 0, x, -x),
        )
        each = torch.stack([f(x) for f in functions])
        rows = torch.cat(
            (
                torch.softmax(x, 1),
                torch.log_softmax(x, 1),
                x.amax(1, True),
                x.amin(1, True),
                x.var(1, keepdim=True),
                x.prod(1, keepdim=True),
            ),
            1,
        )
        mixed = F.scaled_dot_product_attention(y, y, y, attn_mask=torch.ones(3, 3).tril() > 0)
        return (
            each,
            rows,
            mixed,
            self.conv(y),
            self.deep(y),
            self.few(x),
            self.wide(x),
            self.table(at),
            x.argmax(1),
            x[0][at],
            h,
        )


def known_model(kind: str) -> tuple[nn.Module, tuple[Tensor, ...], tuple[str, ...]]:
    """A model, its examples, and the names of its state; the same numbers each time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        models: dict[str, Any] = {
            "mlp": lambda: (
                nn.Sequential(nn.Linear(32, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 5)),
                (torch.zeros(1, 32),),
                (),
            ),
            "gru": lambda: (Gru(), (torch.zeros(1, 8), torch.zeros(1, 32)), ("h",)),
            "lstm": lambda: (Lstm(), (torch.zeros(1, 8), torch.zeros(1, 33), torch.zeros(1, 33)), ("h", "c")),
            "tcn": lambda: (Tcn(), (torch.zeros(1, 4, 1), torch.zeros(1, 4, 3), torch.zeros(1, 17, 5)), ("a", "b")),
            "windowed": lambda: (Windowed(), (torch.zeros(1, 5), torch.zeros(1, 9, 16)), ("window",)),
            "book": lambda: (Book(), (torch.zeros(1, 3, dtype=torch.long), torch.zeros(1, 3, 4)), ()),
            "everything": lambda: (Everything(), (torch.zeros(1, 33), torch.zeros(1, 17)), ("h",)),
        }
        model, examples, state = models[kind]()
    return model.eval(), examples, state


def generated(kind: str, precision: dict[str, str] | None = None) -> Generated:
    model, examples, state = known_model(kind)
    return Program.of(model, examples, state, kind).generated(precision=precision)


def events(kind: str, n: int, seed: int = 0, scale: float = 1.0) -> list[Tensor]:
    """Of each input n values, one after the other."""
    generator = torch.Generator().manual_seed(seed)
    _, examples, state = known_model(kind)
    inputs: Sequence[Tensor] = examples[: len(examples) - len(state)]
    return [
        torch.randn((n, *t.shape), generator=generator) * scale
        if t.is_floating_point()
        else torch.randint(0, 11, (n, *t.shape), generator=generator)
        for t in inputs
    ]
