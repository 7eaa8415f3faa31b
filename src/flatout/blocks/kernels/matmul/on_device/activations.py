"""Functions that a product's kernel takes and applies to the sums in float32.

Importing this needs Triton.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def identity(x):
    return x


@triton.jit
def relu(x):
    return tl.where(x < 0, 0.0, x)  # tl.maximum would turn NaN into 0


@triton.jit
def silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def gelu(x):
    return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))


@triton.jit
def gelu_tanh(x):
    # (1 + tanh u) / 2 = 1 / (1 + exp(-2 u))
    return x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))


ACTIVATIONS = {None: identity, "relu": relu, "silu": silu, "gelu": gelu, "gelu_tanh": gelu_tanh}
