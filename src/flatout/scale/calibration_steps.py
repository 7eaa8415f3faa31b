"""The steps that tell most of a machine's constants in a minute: few layers, and every kind of division."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Final

from msgspec import structs

from flatout.core.records.scale import Layout, ModelShape, Recompute, Software
from flatout.scale.candidates import divisors
from flatout.scale.memory import memory_of

_LAYERS_A_STAGE: Final = 2
_FEWEST_LAYERS: Final = 4
"""Layers on one device, so that what they take is told from what a step takes once."""
_TIMES_MORE: Final = 3
_ROUNDS_OF_MORE: Final = 2
"""Of the rounds below, those that are measured with more layers, too."""
_ROUNDS: Final[tuple[tuple[int, int, Recompute, bool], ...]] = (
    (1, 1, "none", False),
    (4, 1, "none", True),
    (4, 1, "selective", False),
    (1, 1, "full", True),
    (1, 4, "none", False),
    (4, 1, "full", False),
    (1, 4, "selective", False),
    (1, 1, "none", True),
    (1, 4, "full", False),
    (8, 1, "none", False),
)
"""(samples of a micro-batch, micro-batches where there are no stages, recompute, whether something is sharded): what tells most
comes first, since time may run out. Several micro-batches tell what the host does for each from what it does once a step."""
_SHARE_OF_ROOM: Final = 0.85


def calibration_steps(
    model: ModelShape, num_devices: int, software: Software, room_bytes: int | None
) -> list[tuple[ModelShape, Layout]]:
    """What to measure on all devices at hand, the most telling first: each kind of division of a few layers; the same of three
    times as many, which tell what a step takes once from what it takes for each layer; then sizes and recomputing.

    >>> small = ModelShape(hidden=64, layers=24, heads=4, vocab=128, seq=64)
    >>> steps = calibration_steps(small, 2, Software(), None)
    >>> [(m.layers, x.tensor, x.pipeline, x.data, x.shard) for m, x in steps[:3]]
    [(4, 1, 1, 2, 0), (4, 1, 2, 1, 0), (4, 2, 1, 1, 0)]
    >>> sorted({m.layers for m, _ in steps})
    [4, 12]
    """
    few, more = _with_layers(model, num_devices)
    found = _layouts(few, num_devices, _ROUNDS[:_ROUNDS_OF_MORE])
    if more.layers > few.layers:
        found += _layouts(more, num_devices, _ROUNDS[:_ROUNDS_OF_MORE])
    found += _layouts(few, num_devices, _ROUNDS[_ROUNDS_OF_MORE:])
    return [one for one in found if room_bytes is None or _fits(*one, software, room_bytes)]


def _with_layers(model: ModelShape, num_devices: int) -> tuple[ModelShape, ModelShape]:
    """The model with as few layers as every pipeline over the devices needs, two a stage, and four at least; and with up to three
    times as many."""
    fewest = min(model.layers, max(_FEWEST_LAYERS, _LAYERS_A_STAGE * num_devices))
    more = fewest * min(_TIMES_MORE, model.layers // fewest)
    return structs.replace(model, layers=fewest), structs.replace(model, layers=more)


def _layouts(
    model: ModelShape, num_devices: int, rounds: Sequence[tuple[int, int, Recompute, bool]]
) -> list[tuple[ModelShape, Layout]]:
    kinds = [
        (tensor, pipeline, num_devices // tensor // pipeline)
        for tensor, pipeline in product(divisors(num_devices), divisors(num_devices))
        if num_devices % (tensor * pipeline) == 0
        and model.key_heads % tensor == 0
        and model.inner % tensor == 0
        and model.layers % pipeline == 0
    ]
    found = []
    for size, accumulated, recompute, is_sharded in rounds:
        for tensor, pipeline, data in kinds:
            if pipeline > 1 and accumulated > 1:
                continue  # stages have several anyway
            shard = 0 if not is_sharded else 1 if pipeline > 1 else 3
            if shard and data == 1:
                continue
            layout = Layout(
                tensor=tensor,
                pipeline=pipeline,
                data=data,
                micro_batch=size,
                global_batch=size * data * (2 * pipeline if pipeline > 1 else accumulated),
                recompute=recompute,
                shard=shard,
                is_sequence_parallel=tensor > 1,
            )
            found.append((model, layout))
    return found


def _fits(model: ModelShape, layout: Layout, software: Software, room_bytes: int) -> bool:
    """Whether a layout fits with some room left: an allocation that fails on one rank leaves the others waiting."""
    return all(s.total_bytes <= _SHARE_OF_ROOM * room_bytes for s in memory_of(model, layout, software))
