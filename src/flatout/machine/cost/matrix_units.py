"""Products in float32, and what units for coarser numbers would make of them: maths that rules and levers share."""

from __future__ import annotations

import re
from typing import Final

from flatout.core.records.evidence import Evidence, Operator
from flatout.core.records.trial import ModelVariant, TimeModel
from flatout.machine.cost.accounting import facts_named, model_seconds, remaining_fraction, setting_of

_RECURRENT: Final = tuple(
    f"{name}{suffix}" for name in ("mkldnn_rnn_layer", "_cudnn_rnn", "miopen_rnn") for suffix in ("", "_backward")
)
PRODUCTS: Final = (
    "mm",
    "addmm",
    "bmm",
    "baddbmm",
    "convolution",
    "convolution_backward",
    "cudnn_convolution",
    *_RECURRENT,
)
"""aten operators that matrix units can do."""


_CUDNNS: Final = re.compile("conv|cudnn|miopen|lstm|gru|rnn")
"""Operators that cuDNN runs; it may use TF32 unless told otherwise (torch's notes on CUDA, TensorFloat-32)."""
_LARGE: Final = 1024
_ALIGNED: Final = 64
"""128 bytes of half precision: what matrix units' loads are widest at (NVIDIA, Matrix Multiplication Background User's Guide)."""


def float32_products(evidence: Evidence) -> tuple[int, ...]:
    """Indices of the operators that multiply float32 matrices or convolve."""
    return tuple(
        i
        for i, o in enumerate(evidence.operators)
        if o.op.removeprefix("aten.") in PRODUCTS and any(t.dtype == "float32" for t in o.inputs)
    )


def seconds_of_unaligned(evidence: Evidence) -> float:
    """What float32 products take that have a large size which units for half precision dislike: no multiple of 64 numbers."""
    return sum(evidence.operators[i].op_s for i in float32_products(evidence) if _is_unaligned(evidence.operators[i]))


def _is_unaligned(operator: Operator) -> bool:
    sizes = {size for tensor in operator.inputs if len(tensor.shape) in (2, 3) for size in tensor.shape[-2:]}
    return any(size >= _LARGE and size % _ALIGNED for size in sizes)


def seconds_of_products(evidence: Evidence, *, is_finer_than: str = "") -> float:
    """What float32 products take of a step: of the device's time where there is one. `is_finer_than` 'tf32' leaves out those
    that run in TF32 already, as cuDNN's do unless it is forbidden.
    """
    operators = [evidence.operators[i] for i in float32_products(evidence)]
    return sum(o.op_s for o in operators if is_finer_than != "tf32" or not runs_in_tf32(evidence, o))


def image_convolutions(evidence: Evidence) -> tuple[Operator, ...]:
    """Operators that convolve images: four-dimensional tensors."""
    return tuple(
        o for o in evidence.operators if o.op == "aten.convolution" and o.inputs and len(o.inputs[0].shape) == 4
    )


def waits_for_host(evidence: Evidence) -> bool:
    """Whether a device idles for more than half of the step, so that faster products gain nothing."""
    return evidence.steps.device_s is not None and evidence.steps.device_s < 0.5 * evidence.steps.step_s


def autocast_dtype(evidence: Evidence) -> str:
    """The dtype of the autocast under which a root module was called; '' without one that changes anything on this device.

    One for another device changes nothing, and neither does one to float32 (a script whose --dtype says float32).
    """
    device = "cpu" if evidence.workload.device == "cpu" else "cuda"
    regions = (region.split(":") for f in facts_named(evidence, "autocast") for region in f.text.split(","))
    return next((dtype for kind, dtype in regions if kind == device and dtype != "float32"), "")


def is_autocast(evidence: Evidence) -> bool:
    """Whether a root module was called under autocast of the device that it runs on."""
    return bool(autocast_dtype(evidence))


def runs_in_tf32(evidence: Evidence, operator: Operator) -> bool:
    """Whether float32 products of this operator on a GPU may run in TF32: cuDNN's unless it is forbidden, others where it is
    allowed.
    """
    if _CUDNNS.search(operator.op):
        return setting_of(evidence, "cudnn_allow_tf32") != "False"
    return setting_of(evidence, "float32_matmul_precision") in ("high", "medium")


def rate_over_float32(evidence: Evidence, dtype: str) -> float | None:
    """How many times faster a product in this dtype was measured to be on this machine; None where it was not measured."""
    rates = evidence.machine.matmul_flop_per_s if evidence.machine is not None else {}
    return rates[dtype] / rates["float32"] if rates.get(dtype) and rates.get("float32") else None


def tried_saving(evidence: Evidence, variant: ModelVariant) -> float | None:
    """Seconds of a step that a trial of the module in this variant saved; None where it has not run."""
    for result in evidence.trials:
        is_it = isinstance(result.trial, TimeModel) and result.trial.variant == variant
        if is_it and result.now_s is not None and result.cured_s is not None:
            return max(0.0, model_seconds(evidence) * (1 - remaining_fraction(result)))
    return None
