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
    again: float,
    logits: float,
    are_all_in_flight: bool,
) -> Peak:
    """Of a stage with all its weights `own`, of which one layer has `unit` and embedding and head `ends`.

    `again` are the activations of a layer that is recomputed. `are_all_in_flight`: all micro-batches go forward before one goes
    backward, so that there are no gradients yet when activations take most.
    """
    half, full = number_bytes(software), software.gradient_bytes

    def share(parts: tuple[Part, ...]) -> float:
        return sharded(parts, layout) if layout.shard else held(parts)

    is_staged, num = layout.pipeline > 1, layout.num_micro_batches
    is_gathered_again = layout.shard == 3 and not is_staged
    is_whole = layout.shard < 2 or is_staged
    gradients = held(own) * full if is_whole else share(own) * full
    weights = held(ends) * half if is_gathered_again else held(own) * half
    # of the block that computes and of the next; none at the loss
    gathering = 2 * held(unit) * half if is_gathered_again else 0.0
    # a block's gradients; as they are reduced, too, with the shards' and the next block's
    reducing = held(unit) * (2 * half + full) + share(unit) * full
    making = gathering + (held(unit) * half if is_whole and num > 1 else reducing)
    state = share(own) * software.state_bytes
    peaks = []
    if num == 1 or are_all_in_flight:
        peaks.append(
            Peak(weights, 0.0, state, activations, logits, max(0.0, again + making - logits) + held(ends) * half)
        )
    if num > 1:
        held_now = activations * (num - 1) / num if are_all_in_flight else activations
        rest = max(0.0, again + making - logits) + held(ends) * half
        peaks.append(Peak(weights, gradients, state, held_now, logits, rest))
    else:
        done = share(own) - share(ends)
        peaks.append(Peak(held(ends) * half, done * full, state, 0.0, 0.0, held(ends) * (half + full)))
        at_first_block = held(ends) * half + again + reducing
        gathered = held(ends) * half + held(unit) * half
        peaks.append(Peak(gathered, (done - share(unit)) * full, state, 0.0, 0.0, at_first_block))
    return max(peaks, key=sum)
