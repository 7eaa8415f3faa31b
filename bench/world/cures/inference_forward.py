"""Outermost modules called in evaluation mode record no graph."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from outermost import around_outermost


def cure() -> None:
    def quietly(module, call, args, kwargs):
        with torch.set_grad_enabled(torch.is_grad_enabled() and module.training):
            return call(*args, **kwargs)

    around_outermost(quietly)
