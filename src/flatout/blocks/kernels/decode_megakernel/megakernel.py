"""Products and attentions of one new token, one after the other: by torch, or by one persistent kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from flatout.blocks.kernels.cached_attention.rope import rope_decode_attention
from flatout.blocks.kernels.decode_megakernel.launch import MegakernelLaunch, why_not_one
from flatout.blocks.kernels.decode_megakernel.steps import (
    AttentionStep,
    ProductStep,
    Step,
    StepResult,
    checked_attention,
    checked_product,
)
from flatout.blocks.kernels.quantised_linear.mma import packed_linear
from flatout.blocks.kernels.quantised_linear.mma_packing import MmaPackedWeight
from flatout.core.errors import UsageError


class DecodeMegakernel:
    """A list of steps that runs at each call, M rows at a time, as one persistent kernel; the last step's result is returned.

    On a GPU of Hopper or later, in bfloat16 with up to 8 rows, all steps are one launch of as many programs as there are
    processors. They hand on numbers as soon as they have them, and meanwhile weights, keys and values of the next steps are on
    their way; it needs the device for itself. Elsewhere, and where `why_not_one_launch` says why, each step is `packed_linear` or
    `rope_decode_attention`. Results of the two differ by the order of sums. No gradients.

    `cosines_SH2` and `sines_SH2` (float32, half a head wide) are the angles of each place, for the attentions.

    >>> import torch
    >>> from flatout.blocks.kernels.quantised_linear.mma_packing import pack_for_mma
    >>> from flatout.blocks.kernels.quantised_linear.packing import pack_weight
    >>> megakernel = DecodeMegakernel(rows=1, width=128)
    >>> weight = pack_for_mma(pack_weight(torch.full((128, 128), 7.0), bits=4))
    >>> y = megakernel.product(megakernel.input, weight, residual=megakernel.input)
    >>> megakernel(torch.ones(1, 128))[0, :2]
    tensor([897., 897.])
    """

    def __init__(
        self, *, rows: int, width: int, cosines_SH2: Tensor | None = None, sines_SH2: Tensor | None = None
    ) -> None:
        if rows < 1 or width < 1:
            raise UsageError(f"{rows} rows of {width} numbers: both must be at least 1")
        if (cosines_SH2 is None) != (sines_SH2 is None):
            raise UsageError("give cosines and sines together, or neither")
        self.rows, self.input = rows, StepResult(0, width)
        self.angles = None if cosines_SH2 is None or sines_SH2 is None else (cosines_SH2, sines_SH2)
        self.steps: list[Step] = []
        self._attends = False
        self._launched: MegakernelLaunch | None = None

    def product(
        self,
        x: StepResult,
        weight: MmaPackedWeight,
        bias: Tensor | None = None,
        *,
        norm: Tensor | None = None,
        eps: float = 1e-5,
        residual: StepResult | None = None,
    ) -> StepResult:
        """Add a product as `packed_linear`; the result is for later steps. Raises UsageError for sizes that do not fit."""
        step = ProductStep(x, weight, bias, norm, eps, residual)
        checked_product(self.steps, step)
        return self._with(step)

    def attention(self, qkv: StepResult, keys_MGSH: Tensor, values_MGSH: Tensor) -> StepResult:
        """Add an attention as `rope_decode_attention`; the next step must be a product of its result.

        Raises UsageError for sizes that do not fit.
        """
        step = AttentionStep(qkv, keys_MGSH, values_MGSH)
        checked_attention(self.steps, step, self.rows)
        if self.angles is None or any(
            t.dim() != 2 or t.shape[0] < keys_MGSH.shape[2] or t.shape[1] != step.dim // 2 for t in self.angles
        ):
            raise UsageError(f"attention needs cosines and sines, ({keys_MGSH.shape[2]}, {step.dim // 2})")
        self._attends = True
        return self._with(step)

    def __call__(self, x: Tensor, position: Tensor | None = None) -> Tensor:
        """The last step's result [M, N] of x [M, width]. `position` (int64 [1]): the new tokens' place, for attentions.

        By one launch it is a buffer that the next call overwrites. Calls must follow each other on one stream. Raises UsageError
        without steps or that ends with an attention.
        """
        if not self.steps or isinstance(self.steps[-1], AttentionStep):
            raise UsageError("the last step must be a product")
        if x.shape != (self.rows, self.input.width):
            raise UsageError(f"x {tuple(x.shape)} is not {(self.rows, self.input.width)}")
        if self._attends and (
            position is None or position.dtype != torch.int64 or position.shape != (1,) or position.device != x.device
        ):
            raise UsageError("attention needs the position, int64 [1], on x's device")
        if self._launched is not None and self._launched.takes(x):
            return self._launched(x, position)
        if self.why_not_one_launch(x) is not None:
            return self.one_by_one(x, position)
        self._launched = MegakernelLaunch(self.steps, self.rows, self.angles, x.device)
        return self._launched(x, position)

    def why_not_one_launch(self, x: Tensor) -> str | None:
        """Why the steps run one by one; None when they are one launch."""
        return why_not_one(self.steps, self.rows, self.angles, x)

    def one_by_one(self, x: Tensor, position: Tensor | None) -> Tensor:
        """The same steps one by one, in the order they were added: the specification."""
        values = [x]
        for step in self.steps:
            if isinstance(step, ProductStep):
                residual = None if step.residual is None else values[step.residual.number]
                y = packed_linear(
                    values[step.x.number], step.weight, step.bias, norm=step.norm, eps=step.eps, residual=residual
                )
            else:
                assert self.angles is not None  # attention() has asked
                assert position is not None  # the call has asked
                y = rope_decode_attention(values[step.qkv.number], *self.angles, step.keys, step.values, position)
            values.append(y)
        return values[-1]

    def _with(self, step: Step) -> StepResult:
        if self._launched is not None:
            raise UsageError("this megakernel has run; build another one")
        self.steps.append(step)
        return StepResult(len(self.steps), step.width)
