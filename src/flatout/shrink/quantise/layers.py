"""Linear, convolution and recurrent layers with few bits on a CPU, by flatout's own kernel.

Legend: N outputs or numbers of state, K inputs, B batch, T steps, C channels, H W height and width.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from typing import Any, Final, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flatout.core.errors import UsageError
from flatout.shrink.quantise import affine, kernel

GROUP: Final = 64
"""Inputs that share a scale in 4 bits: groups of 32 have less error and twice the scales to read, of 128 the reverse."""
Bits = Literal[4, 8]
Terms = Literal[1, 2]


class FewBits(nn.Module):
    """A matrix in 8 or 4 bits and a bias, multiplied with rows of float32 on a CPU.

    `terms` 2: activations are as good as in 16 bits, so that only the weights' rounding is seen; 1: in 8 bits, for half the work.
    `inputs`: the activations' own scale and zero, seen beforehand; without, each row's largest number gives them.
    Inference alone: there is no gradient, and an input that asks for one is refused.
    """

    packed: Tensor
    scales: Tensor
    shift: Tensor
    activation: Tensor

    def __init__(
        self, weight_NK: Tensor, bias_N: Tensor | None, *, bits: Bits, terms: Terms, inputs: affine.Affine | None = None
    ) -> None:
        super().__init__()
        self.num_outputs, self.num_inputs = weight_NK.shape
        if self.num_inputs > kernel.MOST_INPUTS:
            raise UsageError(f"{self.num_inputs} inputs; sums in whole numbers hold up to {kernel.MOST_INPUTS}")
        if inputs is not None and (bits, terms) != (8, 1):
            raise UsageError("activations with a scale seen beforehand go with weights of 8 bits and one term")
        self.group, self.terms = (GROUP if bits == 4 else 0), terms
        weight = weight_NK.detach().float().cpu()
        shift = torch.zeros(self.num_outputs) if bias_N is None else bias_N.detach().float().cpu()
        packed, scales, whole = _packed(weight, bits=bits)
        step, zero = (0.0, 0.0) if inputs is None else (float(inputs.scale), float(inputs.zero))
        if zero:
            shift = shift - step * zero * scales * whole.sum(1)
        self.register_buffer("packed", packed)
        self.register_buffer("scales", kernel.padded_outputs(scales))
        self.register_buffer("shift", kernel.padded_outputs(shift))
        self.register_buffer("activation", torch.tensor([step, zero]))
        self._call: tuple[int, kernel.FewBitsWeights] | None = None
        self.register_load_state_dict_post_hook(_forget)  # type: ignore[no-untyped-call]

    @property
    def call(self) -> tuple[int, kernel.FewBitsWeights]:
        """What the kernel is called with, by its address; built again when tensors were moved or loaded."""
        if self._call is None:
            tensors = (self.packed, self.scales, self.shift, self.activation)
            dtypes = [t.dtype for t in tensors]
            if any(t.device.type != "cpu" for t in tensors) or dtypes != [torch.uint8, *[torch.float32] * 3]:
                raise UsageError("a layer of this scheme was moved or cast; it works on a CPU, with scales in float32")
            self._check_sizes()
            step, zero = self.activation.tolist()
            sizes = {"k": self.num_inputs, "n": self.num_outputs, "group": self.group, "terms": self.terms}
            shared = kernel.addresses(w=tensors[0], scales=tensors[1], bias=tensors[2], **sizes, step=step, zero=zero)
            self._call = ctypes.addressof(shared), shared
        return self._call

    def forward(self, x: Tensor) -> Tensor:
        """Outputs [..., N] of inputs [..., K], as nn.Linear has them."""
        check_input(x, self.num_inputs)
        return kernel.few_bits_product((self._call or self.call)[0], x.contiguous(), num_outputs=self.num_outputs)

    def extra_repr(self) -> str:
        """Sizes, bits and terms as text."""
        return f"{self.num_inputs}, {self.num_outputs}, bits={4 if self.group else 8}, terms={self.terms}"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_call": None}  # addresses are of this process and these tensors

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take what a copy or a file holds, but for addresses."""
        super().__setstate__({**state, "_call": None})  # type: ignore[no-untyped-call]
        if not self._load_state_dict_post_hooks:
            self.register_load_state_dict_post_hook(_forget)  # type: ignore[no-untyped-call]

    def _check_sizes(self) -> None:
        """Raises UsageError where the tensors, which may come from a file, are not as large as C reads them."""
        sizes = (self.num_outputs, self.num_inputs, self.group, self.terms)
        if any(type(one) is not int for one in sizes) or self.group not in (0, GROUP) or self.terms not in (1, 2):
            raise UsageError(f"a layer in few bits has outputs, inputs, group and terms {sizes}")
        if not (self.num_outputs > 0 and 0 < self.num_inputs <= kernel.MOST_INPUTS):
            raise UsageError(f"a layer in few bits has {self.num_outputs} outputs of {self.num_inputs} inputs")
        blocks, groups = -(-self.num_outputs // kernel.LANES), -(-self.num_inputs // (self.group or 1))
        halves = groups * GROUP // 8 if self.group else -(-self.num_inputs // 4)
        scales = (blocks, groups, kernel.LANES) if self.group else (blocks, kernel.LANES)
        expected = {"packed": (blocks, halves, kernel.LANES, 4), "scales": scales, "shift": (blocks, kernel.LANES)}
        for name, shape in (*expected.items(), ("activation", (2,))):
            found = self._buffers.get(name)
            if found is None or found.shape != shape or not found.is_contiguous():
                raise UsageError(
                    f"'{name}' of a layer in few bits is {found if found is None else tuple(found.shape)}, not {shape}"
                )

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> FewBits:
        self._call = None
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self


def check_input(x: Tensor, num_inputs: int) -> None:
    """UsageError for what the kernel cannot take."""
    if x.dtype is not torch.float32 or x.device.type != "cpu" or x.shape[-1] != num_inputs:
        raise UsageError(
            f"input of {x.dtype}, {tuple(x.shape)}, on {x.device}; a few-bit layer of flatout's kernel takes float32 "
            f"[..., {num_inputs}] on a CPU"
        )
    if x.requires_grad and torch.is_grad_enabled():
        raise UsageError(
            "a few-bit layer has no gradient and its input asks for one; use torch.inference_mode() or prepare_qat"
        )


class FewBitsConv(nn.Module):
    """A convolution over one or two dimensions, ungrouped, padded with zeros, as a product with unfolded inputs.

    It writes each input as often as the kernel covers it: it can gain where weights outweigh places.
    """

    def __init__(self, conv: nn.Conv1d | nn.Conv2d, *, bits: Bits, terms: Terms) -> None:
        super().__init__()
        if conv.groups != 1 or conv.padding_mode != "zeros" or isinstance(conv.padding, str):
            raise UsageError(
                f"groups {conv.groups}, padding {conv.padding} of '{conv.padding_mode}'; ungrouped and zeros are done"
            )
        self.matrix = FewBits(conv.weight.flatten(1), conv.bias, bits=bits, terms=terms)
        self._is_flat = isinstance(conv, nn.Conv1d)
        self._kernel, self._stride = _pair(conv.kernel_size, 1), _pair(conv.stride, 1)
        self._padding, self._dilation = _pair(conv.padding, 0), _pair(conv.dilation, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Outputs of [B, C, H, W] or [B, C, W], or without B, as the convolution has them."""
        if x.dim() != 4 - self._is_flat:
            return self.forward(x[None])[0] if x.dim() == 3 - self._is_flat else _refuse(x)
        image = x[:, :, None] if self._is_flat else x
        if math.prod(self._kernel) * max(self._stride) == 1 and not any(self._padding):
            columns = image.flatten(2)
        else:
            columns = F.unfold(image, self._kernel, self._dilation, self._padding, self._stride)
        y: Tensor = self.matrix(columns.transpose(1, 2)).transpose(1, 2)
        height, width = (self._length(image.shape[2 + d], d) for d in (0, 1))
        return y.reshape(x.shape[0], -1, *((width,) if self._is_flat else (height, width)))

    def _length(self, length: int, d: int) -> int:
        covered = self._dilation[d] * (self._kernel[d] - 1) + 1
        return (length + 2 * self._padding[d] - covered) // self._stride[d] + 1


def _pair(sizes: tuple[int, ...], missing: int) -> tuple[int, int]:
    """Height and width; a convolution over one dimension has `missing` as its height."""
    return (missing, sizes[0]) if len(sizes) == 1 else (sizes[0], sizes[1])


def _refuse(x: Tensor) -> Tensor:
    raise UsageError(f"a convolution was given {tuple(x.shape)}; its batch, channels and places are needed")


def _forget(module: nn.Module, _: object) -> None:
    assert isinstance(module, FewBits)
    module._call = None


def weight_grid(weight_NK: Tensor, *, bits: Bits) -> affine.Affine:
    """The transformation of a layer's weights: of [N, K] in 8 bits, of [N, groups, group] in 4.

    In 4 bits each group is clipped as its squared error likes best.
    """
    if bits == 8:
        return affine.per_channel(weight_NK)
    parts, zero = affine.grouped(weight_NK, group=GROUP), torch.zeros(1, device=weight_NK.device)
    full = torch.maximum(parts.amax(-1, keepdim=True) / 7, -parts.amin(-1, keepdim=True) / 8).clamp(min=2.0**-100)
    best, scale = torch.full_like(full, math.inf), full
    for part in range(20, 12, -1):
        tried = affine.Affine(full * (part / 20), zero, -8, 7)
        error = (tried.fake_quantise(parts) - parts).square().sum(-1, keepdim=True)
        scale = torch.where(error < best, tried.scale, scale)
        best = torch.minimum(best, error)
    return affine.Affine(scale, zero, -8, 7)


def _packed(weight_NK: Tensor, *, bits: Bits) -> tuple[Tensor, Tensor, Tensor]:
    """Packed weights, scales [N] or [N, groups], and whole numbers."""
    by = weight_grid(weight_NK, bits=bits)
    if bits == 8:
        whole = by.quantise(weight_NK)
        return kernel.packed8(whole), by.scale.squeeze(1), whole
    whole = by.quantise(affine.grouped(weight_NK, group=GROUP)).flatten(1)
    return kernel.packed4(whole, group=GROUP), by.scale.squeeze(-1), whole


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
    num_gates = (3 if c is None else 4) * num_state  # C reads and writes a number for each
    has_gates = input_weights.num_outputs == num_gates == state_weights.num_outputs
    if not has_gates or state_weights.num_inputs != num_state:
        raise UsageError(f"the matrices of a recurrent layer in few bits do not fit {num_state} numbers of state")
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
