"""The small models of bench/native.py: the six of our anchors, and seven others. Weights are seeded, of ordinary initialisation.

A module with state is `forward(x, *state) -> (y, *new_state)`; one without is `forward(x) -> y`. Batch is 1. `MODELS` maps a
name to a function that makes the case; all are made in eval mode and without gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

Array = np.ndarray[Any, Any]


class Hand(NamedTuple):
    """A peer written by hand: a file in bench/native_c, and what its `load` takes of the module's numbers."""

    source: str
    packed: Callable[[Any], Array]


class Case(NamedTuple):
    """One model; its fields begin as `(module, inputs, state, about, hand)`."""

    module: nn.Module
    inputs: tuple[Tensor, ...]
    """Of one event: the inputs proper, then zeros for each carried state."""
    state: tuple[str, ...]
    """Parameters of `forward` that are carried: the last ones."""
    about: str
    hand: Hand | None
    below: int = 0
    """Whole numbers among the inputs are drawn from 0 to here."""
    work_flop: int | None = None
    """Of an event that computes no more than its output needs; None: what the module as it is written does."""

    @property
    def num_inputs(self) -> int:
        return len(self.inputs) - len(self.state)

    def events(self, num: int, *, seed: int) -> list[tuple[Tensor, ...]]:
        """Inputs proper of `num` events: standard normal numbers, or whole ones below `below`."""
        generator = torch.Generator().manual_seed(seed)

        def drawn(like: Tensor) -> Tensor:
            if like.is_floating_point():
                return torch.randn(like.shape, generator=generator)
            return torch.randint(self.below, like.shape, generator=generator)

        return [tuple(drawn(x) for x in self.inputs[: self.num_inputs]) for _ in range(num)]

    @property
    def read_bytes(self) -> int:
        """Of weights that an event must read: all, and of a table the rows that are looked up."""
        tables = [m.weight for m in self.module.modules() if isinstance(m, nn.Embedding)]
        rows = sum(x.numel() for x in self.inputs if not x.is_floating_point())
        whole = sum(4 * p.numel() for p in self.module.parameters()) - sum(4 * t.numel() for t in tables)
        return whole + sum(4 * rows * t.shape[1] for t in tables)


def case(build: Callable[[], nn.Module], inputs: tuple[Tensor, ...], about: str, **more: Any) -> Case:
    """The module that `build` makes from seed 0, whatever was drawn before, in eval mode and without gradients."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = build().eval().requires_grad_(False)
    return Case(module, inputs, more.pop("state", ()), about, more.pop("hand", None), **more)


# -------------------------------------------------------------------------------------------------- packing for the C peers
# Outputs lie in lanes: a layer's weight is turned so that what one input gives to all outputs lies together.


def turned(weight: Tensor) -> Tensor:
    return weight.detach().T.contiguous()


def joined(*parts: Tensor) -> Array:
    return torch.cat([p.detach().reshape(-1) for p in parts]).numpy().copy()


def padded(x: Tensor, width: int) -> Tensor:
    """With zeros behind the last dimension."""
    return F.pad(x.detach(), (0, width - x.shape[-1]))


def packed_mlp(module: Any) -> Array:
    first, second, last = module[0], module[2], module[4]
    return joined(
        turned(first.weight), first.bias, turned(second.weight), second.bias, last.weight, padded(last.bias, 16)
    )


def packed_mlp_layernorm(module: Any) -> Array:
    first, norm, second, other, last = module[0], module[1], module[3], module[4], module[6]
    head = padded(turned(last.weight), 16), padded(last.bias, 16)
    parts = [(layer.bias, n.weight, n.bias) for layer, n in ((first, norm), (second, other))]
    return joined(turned(first.weight), *parts[0], turned(second.weight), *parts[1], *head)


def packed_gru(module: Any) -> Array:
    cell = module.cell
    shared = cell.bias_ih[:128] + cell.bias_hh[:128]
    return joined(turned(cell.weight_ih), turned(cell.weight_hh), shared, cell.bias_ih[128:], cell.bias_hh[128:])


def packed_lstm(module: Any) -> Array:
    cell = module.cell
    weight = torch.cat([cell.weight_ih, cell.weight_hh], 1).view(4, 2, 64, 256)  # gate, half, unit, input
    bias = (cell.bias_ih + cell.bias_hh).view(4, 2, 64)
    return joined(weight.permute(1, 3, 0, 2), bias.permute(1, 0, 2))


def packed_tcn(module: Any) -> Array:
    return joined(*(part for layer in module.layers for part in (layer.weight.permute(2, 1, 0), layer.bias)))


# ----------------------------------------------------------------------------------------------------------- the anchors' six


def mlp() -> Case:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))

    return case(build, (torch.zeros(1, 32),), "MLP 32-64-64-1, ReLU", hand=Hand("mlp.c", packed_mlp))


def mlp_layernorm() -> Case:
    def build() -> nn.Module:
        def layer(a: int, b: int) -> list[nn.Module]:
            return [nn.Linear(a, b), nn.LayerNorm(b), nn.GELU()]

        return nn.Sequential(*layer(128, 256), *layer(256, 256), nn.Linear(256, 8))

    about = "MLP 128-256-256-8, LayerNorm and GELU"
    return case(build, (torch.zeros(1, 128),), about, hand=Hand("mlp_layernorm.c", packed_mlp_layernorm))


class CellOfGRU(nn.Module):
    def __init__(self, inputs: int, units: int) -> None:
        super().__init__()
        self.cell = nn.GRUCell(inputs, units)

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = self.cell(x, h)
        return h, h


def gru() -> Case:
    hand = Hand("gru.c", packed_gru)
    inputs = torch.zeros(1, 64), torch.zeros(1, 64)
    return case(lambda: CellOfGRU(64, 64), inputs, "GRU cell 64 on 64", state=("h",), hand=hand)


class CellOfLSTM(nn.Module):
    def __init__(self, inputs: int, units: int) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(inputs, units)

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h, c = self.cell(x, (h, c))
        return h, h, c


def lstm() -> Case:
    inputs = torch.zeros(1, 128), torch.zeros(1, 128), torch.zeros(1, 128)
    about, hand = "LSTM cell 128 on 128", Hand("lstm.c", packed_lstm)
    return case(lambda: CellOfLSTM(128, 128), inputs, about, state=("h", "c"), hand=hand)


class Block(nn.Module):
    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        qkv = self.qkv(self.first(x)).view(batch, tokens, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.down(F.gelu(self.up(self.second(x))))


class Windowed(nn.Module):
    """Causal, normed before each part; what comes out is the last token's."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(64, 4, 256) for _ in range(2))
        self.norm = nn.LayerNorm(64)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.norm(x)[:, -1]


def transformer() -> Case:
    # Multiply-adds: the first block on 32 tokens (a causal mask leaves 528 of 1024 pairs), the second's keys and values, and the
    # rest of it on the last token, which looks at all 32.
    per_token, of_ffn = 4 * 64 * 64, 2 * 64 * 256
    first = 32 * (per_token + of_ffn) + 2 * 528 * 64
    second = 32 * 2 * 64 * 64 + 2 * 64 * 64 + of_ffn + 2 * 32 * 64
    about = "transformer, window 32 x 64, 2 layers, 4 heads, last token out"
    return case(Windowed, (torch.zeros(1, 32, 64),), about, work_flop=2 * (first + second))


class StepOfTCN(nn.Module):
    """One step of a stack of causal convolutions; each layer carries its last (kernel - 1) * dilation inputs."""

    def __init__(self, channels: int, kernel: int, dilations: tuple[int, ...]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv1d(channels, channels, kernel, dilation=d) for d in dilations)

    def forward(self, x: Tensor, s0: Tensor, s1: Tensor, s2: Tensor, s3: Tensor) -> tuple[Tensor, ...]:
        kept = []
        for layer, s in zip(self.layers, (s0, s1, s2, s3), strict=True):
            kept.append(torch.cat([s[:, :, 1:], x], 2))
            x = torch.relu(layer(torch.cat([s, x], 2))) + x
        return x, *kept


def tcn() -> Case:
    dilations = 1, 2, 4, 8
    inputs = torch.zeros(1, 32, 1), *(torch.zeros(1, 32, 2 * d) for d in dilations)
    about, state = "TCN step, 32 channels, kernel 3, dilations 1 2 4 8, residual", ("s0", "s1", "s2", "s3")
    return case(lambda: StepOfTCN(32, 3, dilations), inputs, about, state=state, hand=Hand("tcn.c", packed_tcn))


# ----------------------------------------------------------------------------------------------------------------- the others


def mlp_tanh() -> Case:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4))

    return case(build, (torch.zeros(1, 16),), "MLP 16-32-32-4, tanh")


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(256, 512)
        self.hidden = nn.ModuleList(nn.Linear(512, 512) for _ in range(2))
        self.out = nn.Linear(512, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = F.silu(self.into(x))
        for layer in self.hidden:
            x = x + F.silu(layer(x))
        out: Tensor = self.out(x)
        return out


def mlp_residual() -> Case:
    return case(Residual, (torch.zeros(1, 256),), "MLP 256-512-512-16, SiLU, two residual layers")


def mlp_gelu() -> Case:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))

    return case(build, (torch.zeros(1, 64),), "MLP 64-128-64, GELU")


class SequenceOfOne(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(64, 64, num_layers=2)

    def forward(self, x: Tensor, hx: Tensor) -> tuple[Tensor, Tensor]:
        y, hx = self.gru(x, hx)
        return y, hx


def gru_layers() -> Case:
    inputs = torch.zeros(1, 1, 64), torch.zeros(2, 1, 64)
    return case(SequenceOfOne, inputs, "nn.GRU 64, two layers, a sequence of one", state=("hx",))


def embedding() -> Case:
    def build() -> nn.Module:
        return nn.Sequential(nn.Embedding(1000, 32), nn.Flatten(), nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 8))

    return case(build, (torch.zeros(1, 8, dtype=torch.int64),), "8 ids of 1000 x 32, MLP 256-64-8", below=1000)


class Listening(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv1d(2, 16, 5, stride=2, padding=2), nn.Conv1d(16, 32, 3, stride=2, padding=1)
        self.cell, self.out = nn.GRUCell(32, 64), nn.Linear(64, 8)

    def forward(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.relu(self.second(torch.relu(self.first(x)))).mean(2)
        h = self.cell(x, h)
        return self.out(h), h


def conv_gru() -> Case:
    inputs = torch.zeros(1, 2, 32), torch.zeros(1, 64)
    return case(Listening, inputs, "two convolutions of 2 x 32 samples, GRU cell 64, linear 8", state=("h",))


class Pooling(nn.Module):
    """Four learned queries look at 32 tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.randn(4, 16) / 4)
        self.keys, self.values = nn.Linear(64, 64), nn.Linear(64, 64)
        self.norm, self.out = nn.LayerNorm(64), nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        keys = self.keys(x).view(batch, tokens, 4, 16)
        values = self.values(x).view(batch, tokens, 4, 16)
        weights = (keys * self.query).sum(3).softmax(1)
        out: Tensor = self.out(self.norm((weights.unsqueeze(3) * values).sum(1).reshape(batch, width)))
        return out


def pooling() -> Case:
    return case(Pooling, (torch.zeros(1, 32, 64),), "attention pooling of 32 x 64 by 4 queries, LayerNorm, linear 8")


MODELS: dict[str, Callable[[], Case]] = {
    "mlp": mlp,
    "mlp_layernorm": mlp_layernorm,
    "gru": gru,
    "lstm": lstm,
    "transformer": transformer,
    "tcn": tcn,
    "mlp_tanh": mlp_tanh,
    "mlp_residual": mlp_residual,
    "mlp_gelu": mlp_gelu,
    "gru_layers": gru_layers,
    "embedding": embedding,
    "conv_gru": conv_gru,
    "pooling": pooling,
}
