"""A linear layer whose products are selected by measurement, in the place of torch's.

O outputs, I inputs
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flatout.blocks.kernels.matmul.packing import Packed
from flatout.blocks.kernels.matmul.problem import Activation, Precision
from flatout.blocks.kernels.matmul.product import matmul
from flatout.blocks.kernels.matmul.reference import activated
from flatout.core.errors import UsageError


class Linear(nn.Linear):
    """A linear layer as `nn.Linear`, equal within rounding, whose product runs as the machine's table says.

    Parameters and state are the same. Where an implementation with a repacked weight is fastest, that copy is built at the
    first call and again after the weight has changed (torch counts changes in place). A weight that is trained changes in
    every step: it is taken as a matrix like any other, with repacking measured as part of the call, and no copy is cached.
    `extra_bytes` is what copies take beside the weight, which keeps its shape. `activation` follows the layer in the same call.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        activation: Activation | None = None,
        precision: Precision | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        self.activation, self.precision = activation, precision
        self._packed: Packed | None = None

    @classmethod
    def from_linear(
        cls, layer: nn.Linear, *, activation: Activation | None = None, precision: Precision | None = None
    ) -> Linear:
        """A layer that shares the parameters of an `nn.Linear`, without a copy.

        Raises UsageError for a class derived from nn.Linear, whose forward may be another.

        >>> layer = nn.Linear(3, 2)
        >>> fast = Linear.from_linear(layer)
        >>> fast.weight is layer.weight and bool(torch.equal(fast(torch.ones(1, 3)), layer(torch.ones(1, 3))))
        True
        """
        if type(layer) is not nn.Linear:
            raise UsageError(f"{type(layer).__name__} is not nn.Linear itself and may do more; give an nn.Linear")
        fast = cls(
            layer.in_features, layer.out_features, False, activation=activation, precision=precision, device="meta"
        )
        fast.weight, fast.bias = layer.weight, layer.bias
        return fast.train(layer.training)

    def forward(self, input: Tensor) -> Tensor:
        """The layer's outputs (..., O) of inputs (..., I)."""
        if torch.compiler.is_compiling():
            return activated(F.linear(input, self.weight, self.bias), self.activation)
        if input.dim() == 1:
            return self.forward(input.unsqueeze(0)).squeeze(0)
        is_trained = torch.is_grad_enabled() and self.weight.requires_grad
        weight = self.weight.T if is_trained else self._packed_weight()
        return matmul(input, weight, bias=self.bias, activation=self.activation, precision=self.precision)

    def _packed_weight(self) -> Packed:
        packed = self._packed
        if packed is None or packed.source is not self.weight:
            packed = self._packed = Packed(self.weight, is_transposed=True)
        return packed

    @property
    def extra_bytes(self) -> int:
        """Bytes that copies of the weight take now."""
        return 0 if self._packed is None else self._packed.extra_bytes

    def extra_repr(self) -> str:
        words = [super().extra_repr(), *([f"activation={self.activation}"] if self.activation else [])]
        return ", ".join([*words, *([f"precision={self.precision}"] if self.precision else [])])

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_packed": None}  # copies are built anew where the layer is loaded or copied
