"""LSTM and GRU, cells and whole layers, with 8-bit weights on a CPU, by flatout's own kernel.

Legend: B batch, T steps, K inputs, N numbers of state.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flatout.compression.quantising import kernel
from flatout.compression.quantising.layers import FewBits, Terms, check
from flatout.errors import UsageError


class FewBitsCell(nn.Module):
    """An nn.LSTMCell or nn.GRUCell: both products in 8 bits, gates and state in float32, one call in C."""

    def __init__(self, cell: nn.LSTMCell | nn.GRUCell, *, terms: Terms) -> None:
        super().__init__()
        self._has_cell, self.num_state = isinstance(cell, nn.LSTMCell), cell.hidden_size
        self.given = FewBits(cell.weight_ih, cell.bias_ih, bits=8, terms=terms)
        self.hidden = FewBits(cell.weight_hh, cell.bias_hh, bits=8, terms=terms)

    def forward(self, x: Tensor, state: Tensor | tuple[Tensor, Tensor] | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """As the cell: [B, K] or [K], with h, or (h, c), of [B, N] or [N], zeros when not given."""
        before = _opened(state, (*x.shape[:-1], self.num_state), has_cell=self._has_cell)
        steps = x[None] if x.dim() == 2 else x[None, None]
        _, h, c = _run(self.given, self.hidden, steps, before, self.num_state, turned=False)
        return h if c is None else (h, c)


class FewBitsLayers(nn.Module):
    """An nn.LSTM or nn.GRU over whole sequences, any number of layers, one or both directions; no packed sequences."""

    def __init__(self, layers: nn.LSTM | nn.GRU, *, terms: Terms) -> None:
        super().__init__()
        if layers.proj_size or (layers.dropout and layers.training):
            raise UsageError(
                "a projected state, or dropout in training; call eval(), and keep projected layers in float32"
            )
        self._has_cell, self.num_state = isinstance(layers, nn.LSTM), layers.hidden_size
        self._is_batch_first, self._num_ways = layers.batch_first, 2 if layers.bidirectional else 1
        ends = [f"_l{i}{way}" for i in range(layers.num_layers) for way in ("", "_reverse")[: self._num_ways]]
        self.given, self.hidden = (
            nn.ModuleList(
                FewBits(
                    getattr(layers, f"weight_{part}{end}"),
                    getattr(layers, f"bias_{part}{end}", None),
                    bits=8,
                    terms=terms,
                )
                for end in ends
            )
            for part in ("ih", "hh")
        )

    def forward(
        self, x: Tensor, state: Tensor | tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor | tuple[Tensor, Tensor]]:
        """As the layers: [T, B, K], or [B, T, K] batch first, or [T, K]."""
        if not isinstance(x, Tensor):
            raise UsageError("packed sequences are not done in 8 bits; give padded ones, or keep the layer in float32")
        is_single, is_turned = x.dim() == 2, self._is_batch_first and x.dim() == 3
        steps = x[:, None] if is_single else x.transpose(0, 1) if is_turned else x
        num = len(self.given)
        shape = (num, *(() if is_single else (steps.shape[1],)), self.num_state)
        first_h, first_c = _opened(state, shape, has_cell=self._has_cell)
        last_h: list[Tensor] = []
        last_c: list[Tensor] = []
        for first in range(0, num, self._num_ways):
            ways = []
            for at in range(first, first + self._num_ways):
                given, hidden = self.given[at], self.hidden[at]
                assert isinstance(given, FewBits) and isinstance(hidden, FewBits)
                before = first_h[at], None if first_c is None else first_c[at]
                y, h, c = _run(given, hidden, steps, before, self.num_state, turned=at > first)
                ways.append(y)
                last_h.append(h)
                last_c += [] if c is None else [c]
            steps = ways[0] if len(ways) == 1 else torch.cat(ways, -1)
        y = steps[:, 0] if is_single else steps.transpose(0, 1) if is_turned else steps
        return y, (torch.stack(last_h), torch.stack(last_c)) if last_c else torch.stack(last_h)


def _run(
    given: FewBits,
    hidden: FewBits,
    x_TBK: Tensor,
    before: tuple[Tensor, Tensor | None],
    num_state: int,
    *,
    turned: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Outputs of all steps, and the state after them, of the shape that it had before."""
    h, c = before
    check(x_TBK, given.num_inputs)
    check(h, num_state)
    if h.numel() != x_TBK.shape[1] * num_state or (c is not None and (c.shape != h.shape or c.dtype is not h.dtype)):
        raise UsageError(f"state of {tuple(h.shape)} with {x_TBK.shape[1]} sequences of {num_state} numbers of state")
    addresses = (given._call or given.call)[0], (hidden._call or hidden.call)[0]
    held = h.contiguous(), None if c is None else c.contiguous()
    return kernel.recurrent(addresses, x_TBK.contiguous(), held, num_state=num_state, turned=turned)


def _opened(state: object, shape: tuple[int, ...], *, has_cell: bool) -> tuple[Tensor, Tensor | None]:
    if state is None:
        return torch.zeros(shape), torch.zeros(shape) if has_cell else None
    h, c = state if isinstance(state, tuple | list) else (state, None)
    if not isinstance(h, Tensor) or isinstance(c, Tensor) != has_cell or h.shape != shape:
        raise UsageError(f"the state must be (h, c) for an LSTM and h for a GRU, of {shape}")
    return h, c
