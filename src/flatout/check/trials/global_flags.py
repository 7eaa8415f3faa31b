"""Global switches thrown for the time of one trial's call, and thrown back."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Final, TypeVar

import torch

from flatout.check.observe.collectors.settings import is_flushing_denormals
from flatout.core.runtime.patches import Patches

Context = Callable[[], contextlib.AbstractContextManager[object]]
T = TypeVar("T")


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
def _set(change: Callable[[T], object], value: T, *, before: T) -> Iterator[None]:
    """The switch as `value` says inside, and as it was `before` afterwards."""
    change(value)
    try:
        yield
    finally:
        change(before)


def _tf32() -> contextlib.AbstractContextManager[None]:
    def allow(flags: tuple[str, bool]) -> None:
        torch.set_float32_matmul_precision(flags[0])
        torch.backends.cudnn.allow_tf32 = flags[1]

    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    return _set(allow, ("high", True), before=before)


def anomaly(is_on: bool) -> contextlib.AbstractContextManager[None]:
    """Anomaly detection on or off; whether it looks for NaN stays as it is."""
    check = torch.is_anomaly_check_nan_enabled()
    return _set(lambda on: torch.set_anomaly_enabled(on, check), is_on, before=torch.is_anomaly_enabled())


def deterministic(is_on: bool) -> contextlib.AbstractContextManager[None]:
    """Deterministic algorithms on or off; whether they only warn stays as it is."""
    warn = torch.is_deterministic_algorithms_warn_only_enabled()
    before = torch.are_deterministic_algorithms_enabled()
    return _set(lambda on: torch._C._set_deterministic_algorithms(on, warn_only=warn), is_on, before=before)


SWITCHES: Final[dict[str, Callable[[int], Context]]] = {
    "tf32": lambda _: _tf32,
    "flush-denormal": lambda _: lambda: _set(torch.set_flush_denormal, True, before=is_flushing_denormals()),
    "threads": lambda num: lambda: _set(torch.set_num_threads, num, before=torch.get_num_threads()),
}
"""For each variant of a module's trial that is only a switch: from the trial's factor to the context of the cured call."""
