"""A step run on tensors without data: what it would hold of memory, at no cost of memory.

Tensors on torch's meta device have shapes and types alone. Every storage that an operator makes is counted from its making until
nothing refers to it any more, in the blocks of 512 bytes that CUDA's allocator gives.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from flatout.core.errors import UsageError
from flatout.core.records.scale import StepFootprint
from flatout.core.runtime.patches import AttentionCall, Patches, attention_function
from flatout.core.tensors.nests import tree_iter

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
    tracker, parameters = StorageTracker(block=_BLOCK), []

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
        persistent_bytes=tracker.live_bytes,
        peak_bytes=tracker.peak_bytes,
    )


class StorageTracker(TorchDispatchMode):
    """Counts the storages that operators make, in blocks of so many bytes, while they are alive; `known` ones are not counted."""

    def __init__(self, *, block: int = 1, known: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live_bytes = self.peak_bytes = 0
        self._block, self._sizes = block, {t.untyped_storage()._cdata: 0 for t in known}

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
        self._sizes[key] = size = _blocks(storage.nbytes(), self._block)
        self.live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        weakref.finalize(storage, self._gone, key)

    def _gone(self, key: int) -> None:
        self.live_bytes -= self._sizes.pop(key, 0)


def _blocks(num_bytes: int, block: int = _BLOCK) -> int:
    return -(-num_bytes // block) * block


@contextmanager
def _attention_is_fused() -> Iterator[None]:
    """Keep attention one operator: without data it would be decomposed, with all its scores; here it is the kernel that
    devices have.
    """
    original = F.scaled_dot_product_attention

    def fused(call: AttentionCall) -> Tensor:
        query, key, value = call.query, call.key, call.value
        if not query.is_meta or query.dim() != 4 or call.attn_mask is not None or call.dropout_p:
            return call.run(original)
        if call.enable_gqa:
            key, value = (t.repeat_interleave(query.size(1) // t.size(1), dim=1) for t in (key, value))
        out: Tensor = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, call.is_causal, scale=call.scale
        )[0]
        return out

    patches = Patches()
    patches.set(F, "scaled_dot_product_attention", attention_function(fused))
    try:
        yield
    finally:
        patches.undo()
