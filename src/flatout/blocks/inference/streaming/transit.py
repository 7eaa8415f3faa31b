"""How the weights of a layer travel: where each lies in a stretch of bytes, in how many bits, and how it is made again."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final, Literal, NamedTuple

import torch
from torch import Tensor, nn

from flatout.blocks.kernels.quantised_linear.expand import expand_into
from flatout.blocks.kernels.quantised_linear.packing import expanded, pack_weight, why_not_packed

Transit = Literal["as-is", "bf16", "int8", "int4"]
BITS: Final[dict[Transit, int | None]] = {"as-is": None, "bf16": 16, "int8": 8, "int4": 4}
_ALIGNED: Final = 256
"""Bytes: what torch's own allocations begin at, which some kernels ask for."""


class TransitPart(NamedTuple):
    """A weight among the bytes of its layer. `bits` None: as it is; `why`: for what reason, where others are packed.
    `expanded_at`: where in the room it is used; None: where it came."""

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    bits: int | None
    group: int
    codes_at: int
    codes_bytes: int
    scales_at: int
    scales_bytes: int
    expanded_at: int | None
    why: str = ""

    @property
    def num_bytes(self) -> int:
        """Bytes of the weight as the layer uses it."""
        return math.prod(self.shape) * self.dtype.itemsize


class TransitPlan(NamedTuple):
    """All weights of a layer; `expanded_bytes` is the room for those that are packed."""

    parts: tuple[TransitPart, ...]
    sent_bytes: int
    expanded_bytes: int


def plan_transit(weights: Mapping[str, nn.Parameter], transit: Transit, *, group: int) -> TransitPlan:
    """Where each weight lies. What cannot be packed travels as it is, and its part says why."""
    bits_and_reason = {name: _bits_of(weight, transit, group) for name, weight in weights.items()}
    # With packed weights all go through the room, so that the place is free as soon as they are expanded.
    has_room = any(bits is not None for bits, _ in bits_and_reason.values())
    parts: list[TransitPart] = []
    at = room = 0
    for name, weight in weights.items():
        bits, why = bits_and_reason[name]
        codes_bytes, scales_bytes = _sizes(weight, bits, group)
        scales_at = _up(at + codes_bytes)
        # A dense weight keeps its strides; one that lies apart is laid out as torch would copy it.
        stride = torch.empty_like(weight, device="meta").stride()
        parts.append(
            TransitPart(name, tuple(weight.shape), stride, weight.dtype, bits, group, at, codes_bytes, scales_at, scales_bytes,
                 room if has_room else None, why)
        )  # fmt: skip
        at = _up(scales_at + scales_bytes)
        room += _up(weight.nbytes) if has_room else 0
    return TransitPlan(tuple(parts), at, room)


def _bits_of(weight: Tensor, transit: Transit, group: int) -> tuple[int | None, str]:
    bits = BITS[transit]
    if bits is None:
        return None, ""
    if bits == 16:
        is_wide = weight.is_floating_point() and weight.dtype.itemsize > 2
        return (16, "") if is_wide else (None, f"it is {weight.dtype}, no wider than bfloat16")
    why = why_not_packed(weight.shape, weight.dtype, bits, group)
    return (bits, "") if why is None else (None, why)


def _sizes(weight: Tensor, bits: int | None, group: int) -> tuple[int, int]:
    if bits is None:
        return weight.nbytes, 0
    codes_bytes = weight.numel() * bits // 8
    return codes_bytes, {16: 0, 8: 4 * weight.shape[0], 4: 2 * (weight.numel() // group)}[bits]


def _up(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNED) * _ALIGNED


def fill(into: Tensor, plan: TransitPlan, weights: Mapping[str, nn.Parameter], *, device: torch.device) -> None:
    """Write the layer's bytes into host memory; packing is done on `device`, where it is a thousand times faster than here."""
    for part in plan.parts:
        weight = weights[part.name].detach()
        if part.bits is None:
            as_is(part, into).copy_(weight)
        elif part.bits == 16:
            _codes(part, into).copy_(weight)
        else:
            packed = pack_weight(weight.to(device), bits=part.bits, group=part.group)
            _codes(part, into).copy_(packed.codes)
            scales = _scales(part, into)
            assert scales is not None and packed.scales is not None
            scales.copy_(packed.scales)


def as_is(part: TransitPart, among: Tensor) -> Tensor:
    """A view of a weight that travels as it is."""
    flat = among[part.codes_at : part.codes_at + part.codes_bytes].view(part.dtype)
    return flat.as_strided(part.shape, part.stride)


def _codes(part: TransitPart, among: Tensor) -> Tensor:
    raw = among[part.codes_at : part.codes_at + part.codes_bytes]
    if part.bits == 4:
        return raw.view(part.shape[0], part.shape[1] // 2)
    return raw.view(torch.int8 if part.bits == 8 else torch.bfloat16).view(part.shape)


def _scales(part: TransitPart, among: Tensor) -> Tensor | None:
    if not part.scales_bytes:
        return None
    raw = among[part.scales_at : part.scales_at + part.scales_bytes]
    return raw.view(torch.bfloat16).view(part.shape[0], -1) if part.bits == 4 else raw.view(torch.float32)


class Arrival:
    """The weights of a layer in one place of the ring, and what must be done before they can be used."""

    def __init__(self, plan: TransitPlan, place: Tensor, room: Tensor) -> None:
        self._to_do: list[tuple[Tensor, Tensor, Tensor | None, TransitPart]] = []
        self.weights: dict[str, nn.Parameter] = {}
        for part in plan.parts:
            came = as_is(part, place) if part.bits is None else _codes(part, place)
            target = came
            if part.expanded_at is not None:
                flat = room[part.expanded_at : part.expanded_at + part.num_bytes].view(part.dtype)
                target = flat.as_strided(part.shape, part.stride) if part.bits is None else flat.view(part.shape)
                self._to_do.append((target, came, _scales(part, place), part))
            self.weights[part.name] = nn.Parameter(target, requires_grad=False)

    def expand(self) -> None:
        """One kernel for each weight, on the current stream; nothing for those that are used where they came."""
        for target, codes, scales, part in self._to_do:
            if part.bits is None or part.bits == 16:
                target.copy_(codes)
            else:
                expand_into(target, codes, scales, bits=part.bits, group=part.group)


def rounded_in_transit(weight: Tensor, transit: Transit, *, group: int) -> Tensor:
    """The weight as it is on the device after such a transit.

    >>> rounded_in_transit(torch.tensor([1.001]), "bf16", group=128)
    tensor([1.])
    """
    bits, _ = _bits_of(weight, transit, group)
    if bits is None:
        return weight.detach()
    if bits == 16:
        return weight.detach().bfloat16().to(weight.dtype)
    packed = pack_weight(weight, bits=bits, group=group)
    return expanded(packed.codes, packed.scales, bits=bits, group=group, dtype=weight.dtype)


def bytes_by_transit(plans: Sequence[TransitPlan]) -> dict[str, int]:
    """Bytes of a pass by how they travel: `as-is`, `bf16`, `int8`, `int4`."""
    names = {bits: name for name, bits in BITS.items()}
    found: dict[str, int] = {}
    for part in (part for plan in plans for part in plan.parts):
        name = names[part.bits]
        found[name] = found.get(name, 0) + part.codes_bytes + part.scales_bytes
    return found
