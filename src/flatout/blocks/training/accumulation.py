"""Gradients of several micro-batches added up on each rank, and exchanged once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel


@contextmanager
def accumulate_gradients(model: nn.Module, *, is_last: bool) -> Iterator[None]:
    """Around forward and backward of a micro-batch: ranks exchange gradients in the last of a step only.

    For DistributedDataParallel and FSDP2 (which then keeps whole gradients in between, and wants memory for them); for other
    models it does nothing. The sums are those of exchanging each time, in another order.

    >>> with accumulate_gradients(nn.Linear(2, 1), is_last=False):
    ...     pass
    """
    if isinstance(model, DistributedDataParallel) and not is_last:
        with model.no_sync():
            yield
        return
    sharded = cast("FSDPModule", model) if isinstance(model, FSDPModule) else None
    if sharded is not None:
        sharded.set_requires_gradient_sync(is_last)
    try:
        yield
    finally:
        if sharded is not None:
            sharded.set_requires_gradient_sync(True)
