"""What a stage takes at its peak where each weight is sharded by itself, as FSDP2 does (torch.distributed.fsdp).

Between steps there are shards in float32 with the optimizer's state. A block's weights are gathered in half precision; its
gradients are made in half precision, put into float32, reduced, and added to the shards' gradients, while the next block's are
made. Weights outside of blocks (embedding, head) are one group, whose gradients are reduced last. In the last backward a block
lets go of its gathered weights as it gets its gradients, so that the peak is at the beginning of the last backward or at its end.
"""

from __future__ import annotations

from typing import NamedTuple

from flatout.records.scale import Layout, Software
from flatout.simulate.sizes import Part, held, number_bytes, sharded


class Peak(NamedTuple):
    """Bytes on one device at the peak."""

    weights: float
    gradients: float
    state: float
    activations: float
    logits: float
    buffers: float


def peak_of(
    layout: Layout,
    software: Software,
    *,
    own: tuple[Part, ...],
    unit: tuple[Part, ...],
    ends: tuple[Part, ...],
    activations: float,
    logits: float,
) -> Peak:
    """Of a stage with all its weights `own`, of which one layer has `unit` and embedding and head `ends`."""
    half, full = number_bytes(software), software.gradient_bytes
    share = sharded(own, layout) if layout.shard else held(own)
    share_of_unit = sharded(unit, layout) if layout.shard else held(unit)
    is_staged = layout.pipeline > 1
    is_gathered_again = layout.shard == 3 and not is_staged
    has_many = layout.num_micro_batches > 1
    is_whole = (layout.shard < 2 or is_staged) and (has_many or is_staged)
    gradients = held(own) * full if is_whole else share * full if has_many else 0.0
    weights = (2 * held(unit) + held(ends)) * half if is_gathered_again else held(own) * half
    reducing = held(unit) * (half + full)
    if not is_staged:  # the shards' gradients besides, and those of the next block that are being made
        reducing += share_of_unit * full + held(unit) * half
    state = share * software.state_bytes
    beginning = weights + gradients + activations + max(logits, reducing) + held(ends) * half
    end = share * full + held(ends) * (2 * half + full)
    if end > beginning:
        return Peak(held(ends) * half, share * full, state, 0.0, 0.0, held(ends) * (half + full))
    return Peak(weights, gradients, state, activations, logits, max(0.0, reducing - logits) + held(ends) * half)
