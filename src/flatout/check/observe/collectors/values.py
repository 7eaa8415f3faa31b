"""Facts from the values of tensors: attention masks that a flag would replace, numbers too small to be normal."""

from __future__ import annotations

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
_FEWEST_SUBNORMAL: Final = 0.002


class Subnormal(NamedTuple):
    """Share of subnormal numbers in the sampled results of one operator."""

    share: float
    dtype: str


class TensorValues(Collector, OperatorListener):
    """Looks at values in the deep steps, once for each kind of call. Facts:

    'attention-mask'  a dense mask passed to scaled_dot_product_attention: `kind` says which ('causal', 'all-true', 'window',
                      'documents', 'sparse', 'padding', 'bias', 'other'), `value` the share of pairs it lets through
    'subnormal'       `value` is the share of subnormal numbers among an operator's results on the CPU, `kind` the operator
    """

    def __init__(self) -> None:
        self._masks: dict[OperatorKey, tuple[str, float]] = {}
        self._subnormal: dict[OperatorKey, Subnormal] = {}

    def on_operator(self, call: OperatorCall) -> None:
        """Look at the values of the first call of each kind."""
        key = call.key
        if key.op.startswith("aten._scaled_dot_product") and key.phase != "backward" and key not in self._masks:
            mask = _mask_of(call.inputs)
            if mask is not None:
                self._masks[key] = _kind(mask)
        if key not in self._subnormal:
            self._subnormal[key] = max((_subnormal(r) for r in call.results), default=Subnormal(0.0, ""))

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
        facts = dict.fromkeys((*masks, *subnormal))
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
