"""Random numbers that depend on the shape alone: drawn as for a contiguous float32 tensor, whatever the dtype and memory format.

torch draws in the order of memory, and other numbers for each dtype. So a change of memory format or precision gives dropout and
`randn_like` other numbers of the same distribution, and nothing can be compared. With both sides of a proof inside, equal
positions get equal numbers.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor

_FILLS: Final = (
    "bernoulli_.float",
    "bernoulli_.Tensor",
    "normal_",
    "uniform_",
    "exponential_",
    "log_normal_",
    "cauchy_",
    "geometric_",
)
"""Operators that fill a tensor with random numbers; `randn`, `rand_like`, `multinomial` and dropout on a CPU lead to them."""


@contextmanager
def ordered_draws(is_wanted: Callable[[], bool] = lambda: True) -> Iterator[None]:
    """Kernels that draw are replaced inside it, for compiled code too where it calls them (`fallback_random`).

    A contiguous float32 tensor gets the numbers that it would have had anyway, and each tensor does while `is_wanted` is false.
    """
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns, once, that kernels are replaced
        for key in ("CPU", "CUDA") if torch.cuda.is_available() else ("CPU",):
            for name in _FILLS:
                _replace(library, name, key, _filling(torch.library.get_kernel(f"aten::{name}", key), is_wanted))
        if torch.cuda.is_available():
            _replace(
                library,
                "native_dropout",
                "CUDA",
                _dropping(torch.library.get_kernel("aten::native_dropout", "CUDA"), is_wanted),
            )
    try:
        yield
    finally:
        library._destroy()


def _replace(library: torch.library.Library, name: str, key: str, kernel: Callable[..., Any]) -> None:
    library.impl(name, kernel, key, with_keyset=True, allow_override=True)


def _filling(kernel: Any, is_wanted: Callable[[], bool]) -> Callable[..., Tensor]:
    def fill(keys: Any, tensor: Tensor, *arguments: Any, generator: torch.Generator | None = None) -> Tensor:
        if _is_usual(tensor) or not is_wanted():
            return kernel.call_boxed(keys, tensor, *arguments, generator=generator)  # type: ignore[no-any-return]
        dtype = torch.float32 if tensor.is_floating_point() else tensor.dtype
        drawn = torch.empty(tensor.shape, dtype=dtype, device=tensor.device)
        narrow = (
            a.float().contiguous() if isinstance(a, Tensor) else a for a in arguments
        )  # probabilities, one a number
        kernel.call_boxed(keys, drawn, *narrow, generator=generator)
        return tensor.copy_(drawn)

    return fill


def _dropping(kernel: Any, is_wanted: Callable[[], bool]) -> Callable[..., tuple[Tensor, Tensor]]:
    def drop(keys: Any, tensor: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
        if train is False or _is_usual(tensor) or not is_wanted():
            return kernel.call_boxed(keys, tensor, p, train)  # type: ignore[no-any-return]
        ones = torch.ones(tensor.shape, dtype=torch.float32, device=tensor.device)
        _, drawn = kernel.call_boxed(keys, ones, p, train)
        mask = torch.empty_like(tensor, dtype=torch.bool).copy_(drawn)
        return tensor * mask * (1.0 / (1.0 - p) if p < 1 else 0.0), mask

    return drop


def _is_usual(tensor: Tensor) -> bool:
    return tensor.is_contiguous() and (tensor.dtype == torch.float32 or not tensor.is_floating_point())
