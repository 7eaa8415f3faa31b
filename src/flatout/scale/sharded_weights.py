"""What a stage takes at its peak where each weight is sharded by itself, as FSDP2 does (torch.distributed.fsdp).

Between steps there are shards in float32 with the optimizer's state. A block's weights are gathered in half precision; its
gradients are made in half precision, put into float32, reduced, and added to the shards' gradients, while the next block's are
made. Weights outside of blocks (embedding, head) are one group, whose gradients are reduced last. In the last backward a block
lets go of its gathered weights as it gets its gradients, so that the peak is at the beginning of the last backward or at its end.
"""

from __future__ import annotations

from typing import NamedTuple

from flatout.core.records.scale import Layout, Software
from flatout.scale.sizes import WeightPart, device_parameters, number_bytes, sharded_parameters


class ShardPeak(NamedTuple):
    """Bytes on one device at the peak."""

    weights: float
    gradients: float
    state: float
    activations: float
    logits: float
    buffers: float


class StageLoad(NamedTuple):
    """What one stage holds: all its weights `own`, of which one layer has `unit` and embedding and head `ends`; and bytes of what
    micro-batches bring.

    `again` are the activations of a layer that is recomputed. `are_all_in_flight`: all micro-batches go forward before one goes
    backward, so that there are no gradients yet when activations take most.
    """

    own: tuple[WeightPart, ...]
    unit: tuple[WeightPart, ...]
    ends: tuple[WeightPart, ...]
    activations: float
    again: float
    logits: float
    are_all_in_flight: bool


def shard_peak(layout: Layout, software: Software, stage: StageLoad) -> ShardPeak:
    """Bytes of a stage when it holds the most."""
    half, full = number_bytes(software), software.gradient_bytes

    def share(parts: tuple[WeightPart, ...]) -> float:
        return sharded_parameters(parts, layout) if layout.shard else device_parameters(parts)

    own, unit, ends = (device_parameters(parts) for parts in (stage.own, stage.unit, stage.ends))
    is_staged, num = layout.pipeline > 1, layout.num_micro_batches
    is_gathered_again = layout.shard == 3 and not is_staged
    is_whole = layout.shard < 2 or is_staged
    gradients = (own if is_whole else share(stage.own)) * full
    weights = (ends if is_gathered_again else own) * half
    # of the block that computes and of the next; none at the loss
    gathering = 2 * unit * half if is_gathered_again else 0.0
    # a block's gradients; as they are reduced, too, with the shards' and the next block's
    reducing = unit * (2 * half + full) + share(stage.unit) * full
    making = gathering + (unit * half if is_whole and num > 1 else reducing)
    state = share(stage.own) * software.state_bytes
    rest = max(0.0, stage.again + making - stage.logits) + ends * half
    peaks = []
    if num == 1 or stage.are_all_in_flight:
        peaks.append(ShardPeak(weights, 0.0, state, stage.activations, stage.logits, rest))
    if num > 1:
        live = stage.activations * (num - 1) / num if stage.are_all_in_flight else stage.activations
        peaks.append(ShardPeak(weights, gradients, state, live, stage.logits, rest))
    else:
        done = share(stage.own) - share(stage.ends)
        peaks.append(ShardPeak(ends * half, done * full, state, 0.0, 0.0, ends * (half + full)))
        gathered, left = ends * half + unit * half, (done - share(stage.unit)) * full
        peaks.append(ShardPeak(gathered, left, state, 0.0, 0.0, ends * half + stage.again + reducing))
    return max(peaks, key=sum)
