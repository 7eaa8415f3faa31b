"""What one call of a model costs, measured: operations, bytes, and time beside the model that is given, in the same rounds."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from flatout.cost.flops import operator_flop
from flatout.errors import UsageError
from flatout.measure.timer import compare
from flatout.records.searching import Cost

Runner = Callable[[nn.Module], Callable[[], object]]
"""Makes a model into what is timed, one call of it."""
_WITHOUT_FORMULA: Final = ("mkldnn_rnn_layer", "_cudnn_rnn")
"""Operators with products inside whose shapes do not tell their number; torch's other recurrences are taken apart."""


class Limit(NamedTuple):
    """What a model may cost, one call of it; those that are None are not asked for.

    `latency_fraction` is of the given model's time, measured beside it: a third is 3 times as fast. A measured time holds the
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


def counted(model: nn.Module, inputs: tuple[Tensor, ...]) -> Cost:
    """Parameters, operations and bytes of one call in evaluation mode; the same every time.

    Operations by `cost.flops`; elementwise ones are left out. Raises UsageError for one whose formula is not known (the fused
    recurrent layers): limit latency or bytes then.
    """
    counter = _Counter()
    with called(model), torch.no_grad(), counter:
        model(*inputs)
    held = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in (*model.parameters(), *model.buffers())
    }
    return Cost(
        num_parameters=sum(p.numel() for p in model.parameters()),
        work_flop=counter.flop,
        peak_bytes=sum(held.values()) + counter.peak_bytes,
    )


def timed(
    cost: Cost, model: nn.Module, given: nn.Module, *, inputs: tuple[Tensor, ...], runner: Runner | None, time_s: float
) -> Cost:
    """The cost with its latency, and its fraction of the given model's, from interleaved rounds of about `time_s` in all."""
    made = runner or plain_runner(inputs)
    with called(model), called(given), torch.inference_mode():
        found = compare(
            {"given": made(given), "candidate": made(model)},
            device=inputs[0].device,
            min_time_s=time_s,
            max_time_s=3 * time_s,
        )
    own, ratio = found["candidate"].call_s, found["candidate"].ratio
    fraction = (ratio.value, ratio.low, ratio.high) if ratio is not None else None
    return Cost(
        num_parameters=cost.num_parameters,
        work_flop=cost.work_flop,
        peak_bytes=cost.peak_bytes,
        latency_s=(own.value, own.low, own.high),
        latency_fraction=fraction,
    )


def plain_runner(inputs: tuple[Tensor, ...]) -> Runner:
    """Eager PyTorch in inference mode."""
    return lambda model: lambda: model(*inputs)


def over(cost: Cost, limit: Limit) -> dict[str, float]:
    """How many times a limit is passed, by name; the upper end of the interval counts. Empty: all hold."""
    used = {
        "latency_s": cost.latency_s[2] if cost.latency_s is not None else None,
        "latency_fraction": cost.latency_fraction[2] if cost.latency_fraction is not None else None,
        "peak_bytes": cost.peak_bytes,
        "work_flop": cost.work_flop,
    }
    named = limit.named()
    return {
        name: own / named[name] for name, own in used.items() if name in named and own is not None and own > named[name]
    }


def may_hold(cost: Cost, limit: Limit) -> bool:
    """Whether the lower ends of the measured times hold: a longer measurement may then show that the limit does."""
    pairs = ((cost.latency_s, limit.latency_s), (cost.latency_fraction, limit.latency_fraction))
    return all(own is None or most is None or own[1] <= most for own, most in pairs)


@contextmanager
def called(model: nn.Module) -> Iterator[None]:
    """In evaluation mode inside, each module in its own mode afterwards."""
    before = [(m, m.training) for m in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for m, was in before:
            m.training = was


class _Counter(TorchDispatchMode):
    """Operations, and the bytes of storages that operators made, alive at once."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flop = self.peak_bytes = self._live_bytes = 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2]
        if name in _WITHOUT_FORMULA:
            raise UsageError(
                f"the operations of '{name}' are not known from its shapes; give the model as cells, or leave out work_flop"
            )
        taken = [t for t in tree_iter((args, kwargs)) if isinstance(t, Tensor)]
        for tensor in taken:
            self._see(tensor, is_made=False)
        out = func(*args, **(kwargs or {}))
        made = [t for t in tree_iter(out) if isinstance(t, Tensor)]
        self.flop += operator_flop(name, [tuple(t.shape) for t in taken], [tuple(t.shape) for t in made]) or 0
        for tensor in made:
            self._see(tensor, is_made=True)
        return out

    def _see(self, tensor: Tensor, *, is_made: bool) -> None:
        """Count a storage when an operator makes it; what was there before is not counted."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._sizes:
            return
        self._sizes[key] = storage.nbytes() if is_made else 0
        self._live_bytes += self._sizes[key]
        self.peak_bytes = max(self.peak_bytes, self._live_bytes)
        weakref.finalize(storage, self._gone, key)

    def _gone(self, key: int) -> None:
        self._live_bytes -= self._sizes.pop(key, 0)
