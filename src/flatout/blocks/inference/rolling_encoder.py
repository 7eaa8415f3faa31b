"""A transformer over the last events that computes each event once: another function than the windowed one, and named so.

A windowed encoder sees the last W events anew at every step: each event's keys and values are recomputed from what its window
holds now. `RollingEncoder` keeps every layer's keys and values of the last W events as they were when the event came, so that
an event costs one row instead of W. In the first layer both agree; further up an old event was computed with events that have
left the window since, and without those that came after it. With equal weights the results therefore differ, by how much
`rolling_difference` measures; a model that is trained in this form needs no excuse.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flatout.core.errors import UsageError


class RollingEncoder(nn.Module):
    """One event at a time through a stack of `nn.TransformerEncoderLayer`, whose parameters are shared with `encoder`.

    forward(x [1, 1, d], keys [layers, W, d], values [layers, W, d], num_events [1]) returns the output [1, 1, d] and the new
    state, for `flatout.blocks.inference.native.build(..., state=("keys", "values", "num_events"))`. `num_events` counts events
    up to W; what is before the first event is masked. `example_inputs` are zeros of these shapes.
    """

    def __init__(self, encoder: nn.TransformerEncoder, *, window: int) -> None:
        super().__init__()
        if window < 1:
            raise UsageError(f"window is {window}; give the number of events that it covers, at least 1")
        for number, layer in enumerate(cast(Any, encoder.layers)):
            if type(layer) is not nn.TransformerEncoderLayer or layer.self_attn.in_proj_weight is None:
                raise UsageError(
                    f"layer {number} is a {type(layer).__name__}; a rolling form is there for nn.TransformerEncoderLayer"
                )
        self.encoder, self.window = encoder, window

    @property
    def example_inputs(self) -> tuple[Tensor, ...]:
        """An event, and the state before the first one."""
        layers = cast(Any, self.encoder.layers)
        width = layers[0].self_attn.embed_dim
        rows = torch.zeros(len(layers), self.window, width)
        return torch.zeros(1, 1, width), rows, rows.clone(), torch.zeros(1)

    def forward(
        self, x: Tensor, keys: Tensor, values: Tensor, num_events: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Compute one event; return its output and the new state, in the shapes of the class docstring."""
        num_events = torch.clamp(num_events + 1, max=float(self.window))
        age = torch.arange(self.window - 1, -1, -1, dtype=torch.float32)
        mask = torch.where(age < num_events, 0.0, float("-inf"))
        new_keys, new_values = [], []
        for number, layer in enumerate(self.encoder.layers):
            x, key, value = _layer(layer, x, keys[number], values[number], mask)
            new_keys.append(key)
            new_values.append(value)
        if self.encoder.norm is not None:
            x = self.encoder.norm(x)
        return (
            x,
            torch.cat([keys[:, 1:], torch.stack(new_keys)], 1),
            torch.cat([values[:, 1:], torch.stack(new_values)], 1),
            num_events,
        )


def _layer(layer: Any, x: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """One event through one layer; and its own key and value, [1, d]."""
    attention = layer.self_attn
    width, heads = attention.embed_dim, attention.num_heads
    inner = layer.norm1(x) if layer.norm_first else x
    q, k, v = F.linear(inner[0], attention.in_proj_weight, attention.in_proj_bias).split(width, -1)

    def by_head(rows: Tensor) -> Tensor:
        return rows.view(-1, heads, width // heads).transpose(0, 1)

    recent_keys, recent_values = (by_head(torch.cat([old[1:], new], 0)) for old, new in ((keys, k), (values, v)))
    found = F.scaled_dot_product_attention(by_head(q), recent_keys, recent_values, attn_mask=mask[None, None])
    out = attention.out_proj(found.transpose(0, 1).reshape(1, 1, width))
    if layer.norm_first:
        x = x + out
        x = x + layer.linear2(layer.activation(layer.linear1(layer.norm2(x))))
    else:
        x = layer.norm1(x + out)
        x = layer.norm2(x + layer.linear2(layer.activation(layer.linear1(x))))
    return x, k, v


class RollingDifference(NamedTuple):
    """Differences of the last row's output, relative to its root mean square: root mean square and largest."""

    rms: float
    largest: float


def rolling_difference(encoder: nn.TransformerEncoder, events: Tensor, *, window: int) -> RollingDifference:
    """How far the rolling form is from the windowed one over `events` [T, d], from the first full window on.

    The windowed form is the encoder on the last `window` events, of which the last row goes out.
    """
    if events.dim() != 2 or len(events) < window:
        raise UsageError(f"events is {tuple(events.shape)}; give [T, d] with T at least the window, {window}")
    rolling = RollingEncoder(encoder, window=window).eval()
    is_first = cast(Any, encoder.layers)[0].self_attn.batch_first
    was = encoder.training
    encoder.eval()
    try:
        with torch.no_grad():
            state = rolling.example_inputs[1:]
            off, size = [], []
            for t, event in enumerate(events):
                y, *state = rolling(event[None, None], *state)
                if t + 1 >= window:
                    rows = events[t + 1 - window : t + 1]
                    exact = encoder(rows[None] if is_first else rows[:, None]).reshape(window, -1)[-1]
                    off.append((y.reshape(-1) - exact).double())
                    size.append(exact.double())
    finally:
        encoder.train(was)
    gap, scale = torch.stack(off), torch.stack(size).square().mean().sqrt()
    return RollingDifference(float(gap.square().mean().sqrt() / scale), float(gap.abs().max() / scale))
