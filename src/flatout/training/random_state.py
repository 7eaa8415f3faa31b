"""The state of the global random numbers, in numbers and tensors."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from typing import Any

import torch


def random_state() -> dict[str, Any]:
    """Of every generator that a script may draw from: torch's, that of its current GPU, Python's, NumPy's once it is imported."""
    version, numbers, gauss = random.getstate()
    state: dict[str, Any] = {"python": (version, torch.tensor(numbers), gauss), "torch": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        kind, keys, *rest = numpy.random.get_state()
        state["numpy"] = (kind, torch.from_numpy(keys.copy()), *rest)
    return state


def set_random_state(state: Mapping[str, Any]) -> None:
    """Put a state back, in the process it was taken in or another."""
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers.tolist()), gauss))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    if "numpy" in state:
        import numpy  # it may be imported later only, and would then begin anew

        kind, keys, *rest = state["numpy"]
        numpy.random.set_state((kind, keys.numpy(), *rest))
