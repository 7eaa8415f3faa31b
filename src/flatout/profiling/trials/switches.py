"""Global switches thrown for the time of one trial's call, and thrown back."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch

from flatout.profiling.collectors.settings import is_flushing_denormals
from flatout.profiling.patching import Patches

Context = Callable[[], contextlib.AbstractContextManager[object]]


@contextlib.contextmanager
def without_autocast() -> Iterator[None]:
    """Autocast that code inside asks for stays off; asked for outside and inherited, it is switched off too."""
    patches = Patches()
    original: Callable[..., None] = torch.autocast.__init__

    def disabled(self: torch.autocast, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **{**kwargs, "enabled": False})

    patches.set(torch.autocast, "__init__", disabled)
    try:
        yield
    finally:
        patches.undo()


@contextlib.contextmanager
def _tf32() -> Iterator[None]:
    products, convolutions = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = True
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(products)
        torch.backends.cudnn.allow_tf32 = convolutions


@contextlib.contextmanager
def _flush_denormal() -> Iterator[None]:
    before = is_flushing_denormals()
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(before)


@contextlib.contextmanager
def _threads(num: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(num)
    try:
        yield
    finally:
        torch.set_num_threads(before)


SWITCHES: Final[dict[str, Callable[[int], Context]]] = {
    "tf32": lambda _: _tf32,
    "bf16-autocast": lambda _: lambda: torch.autocast("cuda", dtype=torch.bfloat16),
    "flush-denormal": lambda _: _flush_denormal,
    "threads": lambda num: lambda: _threads(num),
}
"""For each variant of a module's trial that is only a switch: from the trial's factor to the context of the cured call."""
