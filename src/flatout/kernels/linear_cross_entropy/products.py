"""The gradients of hidden, weight and bias, summed chunk by chunk from those of the logits.

N tokens, D width, V vocabulary, C tokens of a chunk
"""

from __future__ import annotations

import torch
from torch import Tensor

from flatout.kernels.linear_cross_entropy.sizes import summed_in


class Gradients:
    """`hidden_ND` and `weight_VD` are given as they were multiplied; the sums have dtypes of their own, see `summed_in`."""

    def __init__(
        self,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        *,
        needs: tuple[bool, bool, bool],
        weight_dtype: torch.dtype,
        num_chunks: int,
    ) -> None:
        self._hidden_ND, self._weight_VD = hidden_ND, weight_VD
        needs_hidden, needs_weight, needs_bias = needs
        dtype = summed_in(num_chunks=num_chunks, weight=weight_dtype, product=hidden_ND.dtype)
        wide = torch.promote_types(dtype, torch.float32)
        none = hidden_ND.new_empty(0)
        self.hidden_ND = torch.empty_like(hidden_ND, memory_format=torch.contiguous_format) if needs_hidden else none
        self.weight_VD = torch.empty(weight_VD.shape, dtype=dtype, device=hidden_ND.device) if needs_weight else none
        self.bias_V = torch.zeros(weight_VD.shape[0], dtype=wide, device=hidden_ND.device) if needs_bias else none
        self._needs = needs
        self._is_first = True
        if num_chunks == 0:
            self.weight_VD.zero_()

    def add(self, rows: slice, gradient_CV: Tensor) -> None:
        """The products of one chunk, whose logits have this gradient."""
        needs_hidden, needs_weight, needs_bias = self._needs
        if needs_hidden:
            torch.mm(gradient_CV, self._weight_VD, out=self.hidden_ND[rows])
        if needs_weight:
            _add_product(self.weight_VD, gradient_CV.t(), self._hidden_ND[rows], is_first=self._is_first)
        if needs_bias:
            self.bias_V += gradient_CV.sum(dim=0, dtype=self.bias_V.dtype)
        self._is_first = False

    def results(
        self, hidden: torch.dtype, weight: torch.dtype | None, bias: torch.dtype | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """In these dtypes; None for that of the sum. Each is memory of its own."""
        made = [
            (self.hidden_ND, hidden),
            (self.weight_VD, weight),
            (self.bias_V, bias),
        ]
        results = [
            (t.to(dtype) if dtype is not None else t) if is_needed else t.new_empty(0)
            for (t, dtype), is_needed in zip(made, self._needs, strict=True)
        ]
        return results[0], results[1], results[2]


def _add_product(total: Tensor, a: Tensor, b: Tensor, *, is_first: bool) -> None:
    """`total += a @ b`, and `total = a @ b` for the first.

    In one pass where the library can: PyTorch's products on GPUs take 16-bit factors into a float32 sum (`out_dtype`, from 2.8;
    with a float32 summand from 2.10).
    """
    if total.dtype == a.dtype:
        torch.mm(a, b, out=total) if is_first else total.addmm_(a, b)
    elif not total.is_cuda:
        total.copy_(a @ b) if is_first else total.add_(a @ b)
    elif is_first:
        torch.mm(a, b, out_dtype=total.dtype, out=total)
    else:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
