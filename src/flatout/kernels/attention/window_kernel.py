"""cuDNN's fused attention within a window, where its front end is installed."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from flatout.kernels.attention import cudnn_window
from flatout.kernels.attention.band import band_of
from flatout.kernels.attention.mask import Mask
from flatout.kernels.attention.scores import Score
from flatout.kernels.attention.sdpa import half_refusal
from flatout.records.kernel import Kernel


def _run(q: Tensor, k: Tensor, v: Tensor, *, mask: Mask, score: Score | None, scale: float) -> Tensor:
    band = band_of(mask)
    assert band is not None
    return cudnn_window.attend(q, k, v, band=cudnn_window.Band(band.left, band.right), scale=scale)


def _refusal(q: Tensor, k: Tensor, v: Tensor, *, mask: Mask, score: Score | None, scale: float) -> str | None:
    why = half_refusal(q, k, v, score=score, widest=128)
    if why is not None:
        return why
    band = band_of(mask)
    if band is None or band.documents is not None or band.left is None or band.right != 0:
        return f"it is for windows that end at the query, and the mask is {mask!r}"
    if torch.cuda.get_device_capability(q.device) < (8, 0):
        return "the GPU's compute capability is below 8.0"
    if not _is_there():
        return "nvidia-cudnn-frontend is not installed; `pip install nvidia-cudnn-frontend` makes windows faster"
    return None


@cache
def _is_there() -> bool:
    return find_spec("cudnn") is not None


KERNEL = Kernel(
    id="attention.cudnn-window",
    op="attention",
    title="cuDNN's fused attention within a window",
    module=__name__,
    run=_run,
    refusal=_refusal,
    order=14,
)
