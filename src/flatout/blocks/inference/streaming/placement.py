"""Decide which layers stay on the device, and how long a pass takes then. Plain numbers, no tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from flatout.core.errors import UsageError


class LayerSizes(NamedTuple):
    """Bytes of one layer: on the device, on its way, and expanded from that (0 where it is used as it comes)."""

    resident: int
    sent: int
    expanded: int


class Timed(NamedTuple):
    """Seconds of one layer: to compute it (expanding included) and to send it; None where it stays on the device.

    `is_freed_early`: its place in the ring is free once it is expanded, and not only after the layer.
    """

    compute_s: float
    send_s: float | None = None
    is_freed_early: bool = False


def spread(num_streamed: int, num_layers: int) -> tuple[int, ...]:
    """The layers that are streamed, as evenly as can be between those that stay, so that each copy has something to hide behind.

    >>> spread(2, 6), spread(3, 4)
    ((1, 4), (0, 2, 3))
    """
    return tuple((2 * i + 1) * num_layers // (2 * num_streamed) for i in range(num_streamed))


def device_bytes(sizes: Sequence[LayerSizes], streamed: Sequence[int], num_buffers: int) -> int:
    """What a choice takes on the device: layers that stay, `num_buffers` places for the others, and room for one expanded."""
    away = set(streamed)
    stays = sum(size.resident for i, size in enumerate(sizes) if i not in away)
    ring = min(num_buffers, len(away)) * max((sizes[i].sent for i in away), default=0)
    return stays + ring + max((sizes[i].expanded for i in away), default=0)


def select_streamed_layers(
    sizes: Sequence[LayerSizes], *, limit_bytes: int | None, num_buffers: int
) -> tuple[int, ...]:
    """The fewest layers to stream so that all else fits; None is no limit.

    Raises UsageError when not even streaming all of them fits.
    """
    if limit_bytes is None:
        return ()
    for num in range(len(sizes) + 1):
        streamed = spread(num, len(sizes)) if num else ()
        if device_bytes(sizes, streamed, num_buffers) <= limit_bytes:
            return streamed
    least = device_bytes(sizes, range(len(sizes)), num_buffers)
    raise UsageError(
        f"{limit_bytes} bytes do not hold what streaming all layers takes, {least} bytes ({num_buffers} on their way, and "
        "room to expand one); give more, fewer ahead, or smaller layers"
    )


def pass_s(layers: Sequence[Timed], *, num_buffers: int, num_passes: int = 4) -> float:
    """Seconds of the last of `num_passes` passes in a row: one stream copies, one computes, the ring goes round across passes.

    A copy begins when the one before has ended and its place is free; a layer when the one before has ended and its weights have
    come.

    >>> layers = [Timed(1.0), Timed(1.0, 3.0)] * 2
    >>> pass_s(layers, num_buffers=2), pass_s(layers, num_buffers=1)
    (6.0, 8.0)
    """
    sends = [(i, layer.send_s) for i, layer in enumerate(layers) if layer.send_s is not None]
    num_buffers = min(num_buffers, len(sends))
    free_s: list[float] = []
    copied_s = ended_s = began_s = 0.0
    for _ in range(num_passes):
        began_s = ended_s
        for layer in layers:
            if layer.send_s is not None:
                place = len(free_s)
                copied_s = max(copied_s, free_s[place - num_buffers] if place >= num_buffers else 0.0) + layer.send_s
                begins_s = max(ended_s, copied_s)
                ended_s = begins_s + layer.compute_s
                free_s.append(begins_s if layer.is_freed_early else ended_s)
            else:
                ended_s += layer.compute_s
    return ended_s - began_s
