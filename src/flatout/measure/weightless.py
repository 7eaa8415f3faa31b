"""A step run on tensors without data: what it would hold of memory, at no cost of memory.

Tensors on torch's meta device have shapes and types alone. Every storage that an operator makes is counted from its making until
nothing refers to it any more, in the blocks of 512 bytes that CUDA's allocator gives.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from flatout.errors import UsageError
from flatout.records.scale import StepFootprint

_BLOCK: Final = 512
"""What CUDA's caching allocator rounds up to (c10/cuda/CUDACachingAllocator)."""

Step = Callable[[], object]


def weigh(make: Callable[[], Step]) -> StepFootprint:
    """What a step of a model holds, without allocating it.

    `make` builds the model and what trains it, on torch's default device, and returns the step, which makes its own inputs. It
    runs twice: the first step makes the optimizer's state. Attention counts as one fused kernel; with a mask or dropout
    as it is written, scores and all. Whatever else a device fuses is counted as it is written, too, which is more. What a
    device's libraries and allocator take besides is not counted.

    Raises UsageError where a step looks at the values of its tensors, or names a device itself.

    >>> def make():
    ...     layer = torch.nn.Linear(1024, 1024, bias=False)
    ...     return lambda: layer(torch.randn(8, 1024)).sum().backward()
    >>> weigh(make).weight_bytes
    4194304
    """
    tracker, parameters = _Tracker(), []

    def collect(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None:
            parameters.append(weakref.ref(parameter))

    with _attention_is_fused(), torch.device("meta"), tracker:
        handle = nn.modules.module.register_module_parameter_registration_hook(collect)
        try:
            step = make()
            if not callable(step):
                raise UsageError(f"make() returned {type(step).__name__}; it must return the step, a function")
            built = tracker.live_bytes
            step()
            tracker.begin()
            step()
        except (NotImplementedError, RuntimeError, ValueError) as e:
            if "meta" not in str(e).lower():
                raise  # an error of the step's own
            raise UsageError(
                f"the step cannot be run on tensors without data: {e}; leave out what reads values (item, print, if) and devices"
            ) from e
        finally:
            handle.remove()
    alive = {id(p): p for ref in parameters if (p := ref()) is not None}.values()
    gradients = sum(_blocks(p.numel() * p.element_size()) for p in alive if p.requires_grad)
    return StepFootprint(
        weight_bytes=sum(_blocks(p.numel() * p.element_size()) for p in alive),
        gradient_bytes=gradients,
        built_bytes=built,
        kept_bytes=tracker.live_bytes,
        peak_bytes=tracker.peak_bytes,
    )


class _Tracker(TorchDispatchMode):
    """Counts the storages that are alive."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live_bytes = self.peak_bytes = 0
        self._sizes: dict[int, int] = {}

    def begin(self) -> None:
        """The peak from here on."""
        self.peak_bytes = self.live_bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_iter(out):
            if isinstance(tensor, Tensor):
                self._see(tensor)
        return out

    def _see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._sizes:
            return
        self._sizes[key] = size = _blocks(storage.nbytes())
        self.live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        weakref.finalize(storage, self._gone, key)

    def _gone(self, key: int) -> None:
        self.live_bytes -= self._sizes.pop(key, 0)


def _blocks(num_bytes: int) -> int:
    return -(-num_bytes // _BLOCK) * _BLOCK


@contextmanager
def _attention_is_fused() -> Iterator[None]:
    """Without data attention would be taken apart, with all its scores; here it is the kernel that devices have."""
    original = F.scaled_dot_product_attention

    def fused(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if not query.is_meta or query.dim() != 4 or attn_mask is not None or dropout_p:
            given: dict[str, Any] = {
                "attn_mask": attn_mask,
                "dropout_p": dropout_p,
                "is_causal": is_causal,
                "scale": scale,
            }
            return original(query, key, value, enable_gqa=enable_gqa, **given)
        if enable_gqa:
            key, value = (t.repeat_interleave(query.size(1) // t.size(1), dim=1) for t in (key, value))
        out: Tensor = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, is_causal, scale=scale
        )[0]
        return out

    F.scaled_dot_product_attention = fused
    try:
        yield
    finally:
        F.scaled_dot_product_attention = original
