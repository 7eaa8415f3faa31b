"""The global random generators of Python, NumPy and PyTorch: where they stand, and putting them there."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch

from flatout.core.tensors.host_bytes import host_bytes


def generator_states() -> dict[str, Any]:
    """Where the generators of the process stand, as values that can be compared and pickled.

    'python' and 'torch'; 'numpy' where that is imported; 'cuda' (one state a device) where that is in use.
    """
    states: dict[str, Any] = {"python": random.getstate(), "torch": bytes(host_bytes(torch.get_rng_state()))}
    if "numpy" in sys.modules:
        kind, words, *others = sys.modules["numpy"].random.get_state()
        states["numpy"] = (kind, words.tobytes(), *others)
    if torch.cuda.is_initialized():
        devices = range(torch.cuda.device_count())
        states["cuda"] = tuple(bytes(host_bytes(torch.cuda.get_rng_state(i))) for i in devices)
    return states


def restore_generator(name: str, state: Any) -> None:
    """Put one of the generators of the host ('python', 'numpy', 'torch') where `generator_states` found it."""
    if name == "python":
        random.setstate(state)
    elif name == "torch":
        torch.set_rng_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    elif name == "numpy":
        numpy = sys.modules["numpy"]
        kind, words, *others = state
        numpy.random.set_state((kind, numpy.frombuffer(words, numpy.uint32), *others))
    else:
        raise ValueError(f"'{name}' is no generator of the host")
