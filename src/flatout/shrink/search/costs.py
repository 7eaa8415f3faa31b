"""What one call of a model costs, measured: operations, bytes, and time beside the original model, in the same rounds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import msgspec
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from flatout.core.errors import UsageError
from flatout.core.records.architecture_search import Cost
from flatout.core.tensors.nests import tree_iter
from flatout.machine.cost.flops import operator_flop
from flatout.machine.measure.timer import compare_times
from flatout.machine.measure.weightless import StorageTracker
from flatout.shrink.model_size import stored_bytes
from flatout.shrink.module_mode import in_mode

Runner = Callable[[nn.Module], Callable[[], object]]
"""Makes a model into what is timed, one call of it."""
_WITHOUT_FORMULA: Final = ("mkldnn_rnn_layer", "_cudnn_rnn")
"""Operators with products inside whose shapes do not tell their number; torch's other recurrences are taken apart."""


class Limit(NamedTuple):
    """What a model may cost, one call of it; those that are None are not asked for.

    `latency_fraction` is of the original model's time, measured beside it: a third is 3 times as fast. A measured time holds the
    limit when its whole interval does.
    """

    latency_s: float | None = None
    latency_fraction: float | None = None
    peak_bytes: int | None = None
    work_flop: int | None = None

    def named(self) -> dict[str, float]:
        """Those that are asked for. Raises UsageError when none is, or one is not above 0."""
        found = {name: float(value) for name, value in self._asdict().items() if value is not None}
        if not found or not all(value > 0 for value in found.values()):
            raise UsageError(f"{self}: give at least one limit, above 0; a search without any finds the largest model")
        return found

    @property
    def is_timed(self) -> bool:
        return self.latency_s is not None or self.latency_fraction is not None


def count_cost(model: nn.Module, inputs: tuple[Tensor, ...]) -> Cost:
    """Parameters, operations and bytes of one call in evaluation mode; the same every time.

    Operations by `cost.flops`; elementwise ones are left out. Raises UsageError for one whose formula is not known (the fused
    recurrent layers): limit latency or bytes then.
    """
    counter, tracker = _FlopCounter(), StorageTracker(known=[*model.parameters(), *model.buffers(), *inputs])
    with in_mode(model, is_training=False), torch.no_grad(), tracker, counter:
        model(*inputs)
    return Cost(
        num_parameters=sum(p.numel() for p in model.parameters()),
        work_flop=counter.flop,
        peak_bytes=stored_bytes(model) + tracker.peak_bytes,
    )


def with_latency(
    cost: Cost,
    model: nn.Module,
    original: nn.Module,
    *,
    inputs: tuple[Tensor, ...],
    runner: Runner | None,
    time_s: float,
) -> Cost:
    """The cost with its latency, and its fraction of the original model's, from interleaved rounds of about `time_s` in all."""
    create: Runner = runner or (lambda model: lambda: model(*inputs))
    with in_mode(model, is_training=False), in_mode(original, is_training=False), torch.inference_mode():
        found = compare_times(
            {"given": create(original), "candidate": create(model)},
            device=inputs[0].device,
            min_time_s=time_s,
            max_time_s=3 * time_s,
        )
    own, ratio = found["candidate"].call_s, found["candidate"].ratio
    fraction = (ratio.value, ratio.low, ratio.high) if ratio is not None else None
    return msgspec.structs.replace(cost, latency_s=(own.value, own.low, own.high), latency_fraction=fraction)


def over(cost: Cost, limit: Limit) -> dict[str, float]:
    """How many times a limit is passed, by name; the upper end of the interval counts. Empty: all hold."""
    used = {name: getattr(cost, name) for name in limit.named()}
    upper = {name: own[2] if isinstance(own, tuple) else own for name, own in used.items() if own is not None}
    return {name: own / most for name, most in limit.named().items() if (own := upper.get(name, 0)) > most}


def may_hold(cost: Cost, limit: Limit) -> bool:
    """Whether the lower ends of the measured times hold: a longer measurement may then show that the limit does."""
    pairs = ((cost.latency_s, limit.latency_s), (cost.latency_fraction, limit.latency_fraction))
    return all(own is None or most is None or own[1] <= most for own, most in pairs)


class _FlopCounter(TorchDispatchMode):
    """Adds up the operations of each operator."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flop = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2]
        if name in _WITHOUT_FORMULA:
            raise UsageError(
                f"the operations of '{name}' are not known from its shapes; give the model as cells, or leave out work_flop"
            )
        out = func(*args, **(kwargs or {}))
        taken, returned = (
            [tuple(t.shape) for t in tree_iter(of) if isinstance(t, Tensor)] for of in ((args, kwargs), out)
        )
        self.flop += operator_flop(name, taken, returned) or 0
        return out
