"""Products and attentions of one new token, one after the other: by torch, or by one launch whose memory traffic never stops."""

from __future__ import annotations

import torch
from torch import Tensor

from flatout.errors import UsageError
from flatout.kernels.cached_attention.turned import turned_attention
from flatout.kernels.chain.launching import Launched, why_not_one
from flatout.kernels.chain.steps import Attention, Product, Step, Value, checked_attention, checked_product
from flatout.kernels.quantised_linear.laid import laid_linear
from flatout.kernels.quantised_linear.laying import Laid


class Chain:
    """Steps that are said once and run at each call, M rows at a time; the last one's result is the chain's.

    On a GPU of Hopper or later, in bfloat16 with up to 8 rows, all steps are one launch of as many programs as there are
    processors. They hand on numbers as soon as they have them, and meanwhile weights, keys and values of the next steps are on
    their way; it needs the device for itself. Elsewhere, and where `why_not_one_launch` says why, each step is `laid_linear` or
    `turned_attention`. Results of the two differ by the order of sums. No gradients.

    `cosines_SH2` and `sines_SH2` (float32, half a head wide) are the angles of each place, for the attentions.

    >>> import torch
    >>> from flatout.kernels.quantised_linear.laying import lay
    >>> from flatout.kernels.quantised_linear.packing import pack
    >>> chain = Chain(rows=1, width=128)
    >>> y = chain.product(chain.given, lay(pack(torch.full((128, 128), 7.0), bits=4)), residual=chain.given)
    >>> chain(torch.ones(1, 128))[0, :2]
    tensor([897., 897.])
    """

    def __init__(
        self, *, rows: int, width: int, cosines_SH2: Tensor | None = None, sines_SH2: Tensor | None = None
    ) -> None:
        if rows < 1 or width < 1:
            raise UsageError(f"{rows} rows of {width} numbers: both must be at least 1")
        if (cosines_SH2 is None) != (sines_SH2 is None):
            raise UsageError("cosines and sines are given together")
        self.rows, self.given = rows, Value(0, width)
        self.angles = None if cosines_SH2 is None or sines_SH2 is None else (cosines_SH2, sines_SH2)
        self.steps: list[Step] = []
        self._attends = False
        self._launched: Launched | None = None

    def product(
        self,
        x: Value,
        weight: Laid,
        bias: Tensor | None = None,
        *,
        norm: Tensor | None = None,
        eps: float = 1e-5,
        residual: Value | None = None,
    ) -> Value:
        """As `laid_linear`; the result for later steps. Raises UsageError for sizes that do not fit."""
        step = Product(x, weight, bias, norm, eps, residual)
        checked_product(self.steps, step)
        return self._with(step)

    def attention(self, qkv: Value, keys_MGSH: Tensor, values_MGSH: Tensor) -> Value:
        """As `turned_attention`; the next step must be a product of the result. Raises UsageError for sizes that do not fit."""
        step = Attention(qkv, keys_MGSH, values_MGSH)
        checked_attention(self.steps, step, self.rows)
        if self.angles is None or any(
            t.dim() != 2 or t.shape[0] < keys_MGSH.shape[2] or t.shape[1] != step.dim // 2 for t in self.angles
        ):
            raise UsageError(f"a chain with attention needs cosines and sines, ({keys_MGSH.shape[2]}, {step.dim // 2})")
        self._attends = True
        return self._with(step)

    def __call__(self, x: Tensor, position: Tensor | None = None) -> Tensor:
        """The last step's result [M, N] of x [M, width]. `position` (int64 [1]): the new tokens' place, for attentions.

        By one launch it is a buffer that the next call overwrites. Calls must follow each other on one stream. Raises UsageError
        for a chain without steps or that ends with an attention.
        """
        if not self.steps or isinstance(self.steps[-1], Attention):
            raise UsageError("a chain ends with a product")
        if x.shape != (self.rows, self.given.width):
            raise UsageError(f"x {tuple(x.shape)} is not {(self.rows, self.given.width)}")
        if self._attends and (
            position is None or position.dtype != torch.int64 or position.shape != (1,) or position.device != x.device
        ):
            raise UsageError("a chain with attention needs the position, int64 [1], on x's device")
        if self._launched is not None and self._launched.takes(x):
            return self._launched(x, position)
        if self.why_not_one_launch(x) is not None:
            return self.one_by_one(x, position)
        self._launched = Launched(self.steps, self.rows, self.angles, x.device)
        return self._launched(x, position)

    def why_not_one_launch(self, x: Tensor) -> str | None:
        """Why the steps run one by one; None when they are one launch."""
        return why_not_one(self.steps, self.rows, self.angles, x)

    def one_by_one(self, x: Tensor, position: Tensor | None) -> Tensor:
        """The specification."""
        made = [x]
        for step in self.steps:
            if isinstance(step, Product):
                residual = None if step.residual is None else made[step.residual.number]
                y = laid_linear(
                    made[step.x.number], step.weight, step.bias, norm=step.norm, eps=step.eps, residual=residual
                )
            else:
                assert self.angles is not None  # attention() has asked
                assert position is not None  # the call has asked
                y = turned_attention(made[step.qkv.number], *self.angles, step.keys, step.values, position)
            made.append(y)
        return made[-1]

    def _with(self, step: Step) -> Value:
        if self._launched is not None:
            raise UsageError("this chain has run; say another one")
        self.steps.append(step)
        return Value(len(self.steps), step.width)
