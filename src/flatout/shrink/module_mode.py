"""Training or evaluation mode for a while, each module back in its own afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def in_mode(module: nn.Module, *, is_training: bool) -> Iterator[None]:
    """A context in which all modules are in one mode; afterwards each is in the mode that it had."""
    before = [(m, m.training) for m in module.modules()]
    module.train(is_training)
    try:
        yield
    finally:
        for m, was in before:
            m.training = was
