"""FlashAttention-2 over documents and windows: tokens behind one another, nothing padded, nothing built but the offsets."""

from __future__ import annotations

import torch
from torch import Tensor

from flatout.kernels.attention import flash
from flatout.kernels.attention.band import Band, band_of
from flatout.kernels.attention.mask import Mask
from flatout.kernels.attention.scores import Score
from flatout.kernels.attention.sdpa import half_refusal
from flatout.records.kernel import Kernel


def _run(q: Tensor, k: Tensor, v: Tensor, *, mask: Mask, score: Score | None, scale: float) -> Tensor:
    band = band_of(mask)
    assert band is not None
    batch, _, length, _ = q.shape
    key = ("spans", batch, length, q.device)
    spans = (band.documents or mask).keep(key, lambda: _spans(band, batch, length, q.device))
    rows = [t.transpose(1, 2).reshape(batch * length, t.size(1), t.size(3)) for t in (q, k, v)]
    out = flash.attend(*rows, spans=spans, left=band.left, right=band.right, scale=scale)
    return out.view(batch, length, *out.shape[1:]).transpose(1, 2)


def _spans(band: Band, batch: int, length: int, device: torch.device) -> flash.Spans:
    """Of the documents of all samples; without documents a sample is one."""
    offsets = torch.tensor([0, length]) if band.documents is None else band.documents.offsets
    assert offsets is not None
    longest = int(offsets.diff().max())
    starts = torch.arange(batch)[:, None] * length + offsets[:-1]
    every = torch.cat([starts.reshape(-1), torch.tensor([batch * length])]).to(torch.int32)
    return flash.Spans(every.pin_memory().to(device, non_blocking=True), longest)


def _refusal(q: Tensor, k: Tensor, v: Tensor, *, mask: Mask, score: Score | None, scale: float) -> str | None:
    why = half_refusal(q, k, v, score=score, widest=256)
    if why is not None:
        return why
    band = band_of(mask)
    if band is None:
        return f"{mask!r} is more than a window within documents that lie behind one another"
    if q.size(2) != k.size(2):
        return f"there are {q.size(2)} queries and {k.size(2)} keys"
    if torch.cuda.get_device_capability(q.device) < (8, 0):
        return "the GPU's compute capability is below 8.0"
    return None


KERNEL = Kernel(
    id="attention.flash-varlen",
    op="attention",
    title="FlashAttention-2 on tokens that lie behind one another",
    module=__name__,
    run=_run,
    refusal=_refusal,
    order=16,
)
