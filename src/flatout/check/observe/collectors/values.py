"""Facts from the values of tensors: attention masks that a flag would replace, numbers too small to be normal."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec
import torch
from torch import Tensor

from flatout.blocks.kernels.attention.recognition import recognised
from flatout.check.observe.calls import is_wrapper
from flatout.check.observe.collector import Collector
from flatout.check.observe.discovery import CollectorEntry
from flatout.check.observe.operators.recorder import OperatorCall, OperatorKey, OperatorListener
from flatout.core.records.evidence import Evidence
from flatout.core.records.usage import ModuleFact

_LARGEST_MASK: Final = 64 << 20
_SAMPLED: Final = 2048
_FEWEST: Final = 256
_LARGE_MATRIX: Final = 1 << 18
_MOSTLY: Final = 0.9
"""Share of zeros from which a sparse product is several times faster than a dense one on a CPU."""
_READ_MATRICES: Final = ("aten.mm", "aten.addmm", "aten.mul")
_FEWEST_SUBNORMAL: Final = 0.002
_UNWRITTEN: Final = re.compile(r"aten\.(empty|new_empty|resize)")
"""Operators whose results hold what the memory held before."""


class Subnormal(NamedTuple):
    """Share of subnormal numbers in the sampled results of one operator."""

    share: float
    dtype: str


class TensorValues(Collector, OperatorListener):
    """Looks at values in the deep steps, once for each kind of call. Facts:

    'attention-mask'  a dense mask passed to scaled_dot_product_attention: `kind` says which ('causal', 'all-true', 'window',
                      'documents', 'sparse', 'padding', 'bias', 'other'), `value` the share of pairs it lets through
    'mostly-zeros'    a matrix from before the step that an operator reads is nearly all zeros: `kind` is the operator, `value`
                      the share of zeros, `text` the matrix's rows and columns ('2708x1433')
    'subnormal'       `value` is the share of subnormal numbers among an operator's results on the CPU, `kind` the operator
    """

    def __init__(self) -> None:
        self._masks: dict[OperatorKey, tuple[str, float]] = {}
        self._subnormal: dict[OperatorKey, Subnormal] = {}
        self._zeros: dict[OperatorKey, tuple[float, str]] = {}

    def on_operator(self, call: OperatorCall) -> None:
        """Look at the values of the first call of each kind."""
        key = call.key
        if key.op.startswith("aten._scaled_dot_product") and key.phase != "backward" and key not in self._masks:
            mask = _mask_of(call.inputs)
            if mask is not None:
                self._masks[key] = _kind(mask)
        if key not in self._subnormal and not _UNWRITTEN.match(key.op):
            self._subnormal[key] = max((_subnormal(r) for r in call.results), default=Subnormal(0.0, ""))

        if key.op in _READ_MATRICES and key.phase != "backward" and key not in self._zeros:
            pairs = zip(call.inputs, call.producers, strict=False)
            found = (_zeros(tensor) for tensor, producer in pairs if tensor.dim() == 2 and producer == -1)
            self._zeros[key] = max(found, default=(0.0, ""))

    def fill(self, evidence: Evidence) -> Evidence:
        """Add what was found to `module_facts`, one fact for each line and module."""
        masks = (
            ModuleFact(name="attention-mask", module=k.module, kind=kind, value=share, source=k.site)
            for k, (kind, share) in self._masks.items()
        )
        subnormal = (
            ModuleFact(name="subnormal", module=k.module, kind=k.op, value=s.share, text=s.dtype, source=k.site)
            for k, s in self._subnormal.items()
            if s.share > _FEWEST_SUBNORMAL
        )
        zeros = (
            ModuleFact(name="mostly-zeros", module=k.module, kind=k.op, value=share, text=sizes, source=k.site)
            for k, (share, sizes) in self._zeros.items()
            if share >= _MOSTLY
        )
        facts = dict.fromkeys((*masks, *subnormal, *zeros))
        return msgspec.structs.replace(evidence, module_facts=(*evidence.module_facts, *facts))


def _mask_of(inputs: Sequence[Tensor]) -> Tensor | None:
    """The tensor among the inputs that has one number for each pair of query and key."""
    if len(inputs) < 4 or inputs[0].dim() != 4:
        return None
    pairs = (inputs[0].shape[-2], inputs[1].shape[-2])
    masks = (t for t in inputs[3:] if t.dim() >= 2 and tuple(t.shape[-2:]) == pairs)
    return next((t for t in masks if not is_wrapper(t)), None)


def _kind(mask: Tensor) -> tuple[str, float]:
    """What kind of mask it is, and the share of pairs that it lets through."""
    if mask.numel() > _LARGEST_MASK or not 2 <= mask.dim() <= 4:
        return "other", 1.0
    found = recognised(mask)
    return found.kind, found.share


def _zeros(matrix: Tensor) -> tuple[float, str]:
    """Share of zeros among some elements, spread evenly, and the sizes; 0 for a small one or one that is not on the CPU."""
    is_plain = not is_wrapper(matrix) and matrix.device.type == "cpu" and matrix.layout == torch.strided
    if not is_plain or not matrix.is_floating_point() or matrix.numel() < _LARGE_MATRIX or not matrix.is_contiguous():
        return 0.0, ""
    sample = matrix.detach().view(-1)[:: _odd(matrix.numel() // _SAMPLED)]
    return float((sample == 0).float().mean()), "x".join(map(str, matrix.shape))


def _odd(stride: int) -> int:
    """An odd stride does not meet the same column again and again."""
    return stride | 1


def _subnormal(result: Tensor) -> Subnormal:
    """Share of subnormal numbers among some elements, spread evenly over the result."""
    none = Subnormal(0.0, "")
    if is_wrapper(result):  # reading its values may communicate
        return none
    if result.device.type != "cpu" or not result.is_floating_point() or result.numel() < _FEWEST:
        return none
    if result.layout != torch.strided or not result.is_contiguous():
        return none
    sample = result.detach().view(-1)[:: max(1, result.numel() // _SAMPLED)]
    small = sample.abs() < torch.finfo(result.dtype).tiny
    share = float((small & (sample != 0)).float().mean())
    return Subnormal(share, str(result.dtype).removeprefix("torch."))


COLLECTOR: Final = CollectorEntry(lambda observation: TensorValues())
