"""The steps of a decode megakernel: products with packed weights, and attentions of one new token, one after the other.

M rows, one new token of each of M sequences
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from flatout.blocks.kernels.quantised_linear.mma_packing import MmaPackedWeight
from flatout.core.errors import UsageError


class StepResult(NamedTuple):
    """The result of a step, [M, width]; 0 is the megakernel's input, and `number` the step's, counted from 1."""

    number: int
    width: int


class ProductStep(NamedTuple):
    """A product: residual + gated(F.linear(F.rms_norm(x, norm), weight)) + bias, as in `packed_linear`."""

    x: StepResult
    weight: MmaPackedWeight
    bias: Tensor | None
    norm: Tensor | None
    eps: float
    residual: StepResult | None

    @property
    def width(self) -> int:
        return self.weight.outputs // 2 if self.weight.is_gated else self.weight.outputs


class AttentionStep(NamedTuple):
    """An attention as in `rope_decode_attention`; keys and values are [M, G, S, H]."""

    qkv: StepResult
    keys: Tensor
    values: Tensor

    @property
    def groups(self) -> int:
        return self.keys.shape[1]

    @property
    def dim(self) -> int:
        return self.keys.shape[3]

    @property
    def heads(self) -> int:
        return self.qkv.width // self.dim - 2 * self.groups

    @property
    def width(self) -> int:
        return self.heads * self.dim


Step = ProductStep | AttentionStep


def checked_product(steps: list[Step], step: ProductStep) -> None:
    """Raises UsageError where sizes do not meet, or where attention's result is used where one launch cannot."""
    if step.x.width != step.weight.inputs:
        raise UsageError(f"a value of {step.x.width} numbers does not meet a weight of {step.weight.inputs} inputs")
    if step.residual is not None and step.residual.width != step.width:
        raise UsageError(f"a residual of {step.residual.width} numbers is not {step.width}")
    if any(t is not None and t.shape != (n,) for t, n in ((step.norm, step.weight.inputs), (step.bias, step.width))):
        raise UsageError(f"norm must be of {step.weight.inputs} numbers, bias of {step.width}")
    if steps and isinstance(steps[-1], AttentionStep) and step.x.number != len(steps):
        raise UsageError("the step after an attention must be a product of its result")
    for value in (step.residual, None if step.x.number == len(steps) else step.x):
        if value is not None and value.number and isinstance(steps[value.number - 1], AttentionStep):
            raise UsageError("an attention's result is read by the product behind it alone")


def checked_attention(steps: list[Step], step: AttentionStep, rows: int) -> None:
    """Raises UsageError where sizes do not meet."""
    keys, values = step.keys, step.values
    if keys.dim() != 4 or keys.shape != values.shape or keys.shape[0] != rows:
        raise UsageError(f"keys {tuple(keys.shape)} and values {tuple(values.shape)} are not [{rows}, G, S, H] both")
    if step.qkv.width % step.dim or step.heads < 1 or step.heads % step.groups:
        raise UsageError(
            f"{step.qkv.width} numbers are not some heads of queries for {step.groups} heads of keys of {step.dim}"
        )
    if steps and isinstance(steps[-1], AttentionStep):
        raise UsageError("the step after an attention must be a product of its result")
