"""Triton: SwiGLU over rows that may lie apart, forward and backward.

R rows, D width. This folder has no __init__.py, so that the registry's search passes it by: it is imported when it is run, and
only where there is Triton.
"""
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def swiglu_forward(gate_RD, up_RD, result_RD, gate_stride, up_stride, width, BLOCK: tl.constexpr):
    """One stretch of a row a program."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < width
    gate = tl.load(gate_RD + row * gate_stride + at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_RD + row * up_stride + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(result_RD + row * width + at, (gate * tl.sigmoid(gate) * up).to(result_RD.dtype.element_ty), mask=mask)


@triton.jit
def swiglu_backward(
    grad_RD,
    gate_RD,
    up_RD,
    gate_grad_RD,
    up_grad_RD,
    grad_stride,
    gate_stride,
    up_stride,
    result_stride,
    width,
    BLOCK: tl.constexpr,
):
    """Both gradients; rows of the results lie `result_stride` apart, so that they can be halves of one array."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < width
    grad = tl.load(grad_RD + row * grad_stride + at, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(gate_RD + row * gate_stride + at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_RD + row * up_stride + at, mask=mask, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    to_gate = grad * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
    kind = gate_grad_RD.dtype.element_ty
    tl.store(gate_grad_RD + row * result_stride + at, to_gate.to(kind), mask=mask)
    tl.store(up_grad_RD + row * result_stride + at, (grad * gate * sigmoid).to(kind), mask=mask)
