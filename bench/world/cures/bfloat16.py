"""Every outermost module under bfloat16 autocast; what it returns goes back to float32."""

import sys
from pathlib import Path

import torch
from torch.utils._pytree import tree_map_only  # noqa: TID251  # nothing of flatout is imported here

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from outermost import around_outermost


def cure() -> None:
    def in_bfloat16(module, call, args, kwargs):
        kind = next(module.parameters()).device.type
        with torch.autocast(kind, dtype=torch.bfloat16):
            out = call(*args, **kwargs)
        return tree_map_only(torch.Tensor, lambda t: t.float() if t.dtype == torch.bfloat16 else t, out)

    around_outermost(in_bfloat16)
