"""LSTM and GRU, cells and whole layers, with 8-bit weights on a CPU, by flatout's own kernel.

Legend: B batch, T steps, K inputs, N numbers of state.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flatout.core.errors import UsageError
from flatout.shrink.quantise import kernel
from flatout.shrink.quantise.layers import FewBits, Terms, check_input


class FewBitsCell(nn.Module):
    """An nn.LSTMCell or nn.GRUCell: both products in 8 bits, gates and state in float32, one call in C."""

    def __init__(self, cell: nn.LSTMCell | nn.GRUCell, *, terms: Terms) -> None:
        super().__init__()
        self._has_cell, self.num_state = isinstance(cell, nn.LSTMCell), cell.hidden_size
        self.input_weights = FewBits(cell.weight_ih, cell.bias_ih, bits=8, terms=terms)
        self.state_weights = FewBits(cell.weight_hh, cell.bias_hh, bits=8, terms=terms)

    def forward(self, x: Tensor, state: Tensor | tuple[Tensor, Tensor] | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """One step, called as the cell is: [B, K] or [K], with h, or (h, c), of [B, N] or [N], zeros when not given."""
        before = _opened(state, (*x.shape[:-1], self.num_state), has_cell=self._has_cell)
        steps = x[None] if x.dim() == 2 else x[None, None]
        _, h, c = _run(self.input_weights, self.state_weights, steps, before, self.num_state, backwards=False)
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
        self._is_batch_first, self._num_directions = layers.batch_first, 2 if layers.bidirectional else 1
        ends = [
            f"_l{i}{direction}"
            for i in range(layers.num_layers)
            for direction in ("", "_reverse")[: self._num_directions]
        ]
        self.input_weights, self.state_weights = (
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
        """All steps, called as the layers are: [T, B, K], or [B, T, K] batch first, or [T, K]."""
        if not isinstance(x, Tensor):
            raise UsageError("packed sequences are not done in 8 bits; give padded ones, or keep the layer in float32")
        is_single, is_transposed = x.dim() == 2, self._is_batch_first and x.dim() == 3
        steps = x[:, None] if is_single else x.transpose(0, 1) if is_transposed else x
        num = len(self.input_weights)
        shape = (num, *(() if is_single else (steps.shape[1],)), self.num_state)
        first_h, first_c = _opened(state, shape, has_cell=self._has_cell)
        last_h: list[Tensor] = []
        last_c: list[Tensor] = []
        for first in range(0, num, self._num_directions):
            outputs = []
            for at in range(first, first + self._num_directions):
                input_weights, state_weights = self.input_weights[at], self.state_weights[at]
                assert isinstance(input_weights, FewBits) and isinstance(state_weights, FewBits)
                before = first_h[at], None if first_c is None else first_c[at]
                y, h, c = _run(input_weights, state_weights, steps, before, self.num_state, backwards=at > first)
                outputs.append(y)
                last_h.append(h)
                last_c += [] if c is None else [c]
            steps = outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)
        y = steps[:, 0] if is_single else steps.transpose(0, 1) if is_transposed else steps
        return y, (torch.stack(last_h), torch.stack(last_c)) if last_c else torch.stack(last_h)


def _run(
    input_weights: FewBits,
    state_weights: FewBits,
    x_TBK: Tensor,
    before: tuple[Tensor, Tensor | None],
    num_state: int,
    *,
    backwards: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Outputs of all steps, and the state after them, of the shape that it had before."""
    h, c = before
    check_input(x_TBK, input_weights.num_inputs)
    check_input(h, num_state)
    if h.numel() != x_TBK.shape[1] * num_state or (c is not None and (c.shape != h.shape or c.dtype is not h.dtype)):
        raise UsageError(f"state of {tuple(h.shape)} with {x_TBK.shape[1]} sequences of {num_state} numbers of state")
    addresses = (input_weights._call or input_weights.call)[0], (state_weights._call or state_weights.call)[0]
    state = h.contiguous(), None if c is None else c.contiguous()
    return kernel.few_bits_recurrent(addresses, x_TBK.contiguous(), state, num_state=num_state, backwards=backwards)


def _opened(state: object, shape: tuple[int, ...], *, has_cell: bool) -> tuple[Tensor, Tensor | None]:
    if state is None:
        return torch.zeros(shape), torch.zeros(shape) if has_cell else None
    h, c = state if isinstance(state, tuple | list) else (state, None)
    if not isinstance(h, Tensor) or isinstance(c, Tensor) != has_cell or h.shape != shape:
        raise UsageError(f"the state must be (h, c) for an LSTM and h for a GRU, of {shape}")
    return h, c
