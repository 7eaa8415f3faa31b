"""Padding in a batch: trailing constants along the second dimension, and what speaks for their being padding."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from flatout.check.observe.calls import is_wrapper

_SMALLEST_WIDTH: Final = 8
_LARGEST_BYTES: Final = 64 << 20


class PaddedRows(NamedTuple):
    """Lengths of the rows of one tensor, without their padding."""

    width: int
    lengths: tuple[int, ...]
    pad_value: float


class PaddedTensor:
    """What was found in one tensor of the batches so far."""

    def __init__(self, name: str, tensor: Tensor) -> None:
        self.name = name
        self.shape = tuple(tensor.shape)
        self.dtype = str(tensor.dtype).removeprefix("torch.")
        self.padding: list[float] = []
        self.longest: list[float] = []
        self.mean_length: list[float] = []
        self.pad_value = 0.0
        self.source = -1

    def add(self, rows: PaddedRows) -> None:
        """Add the padding of one batch."""
        total = rows.width * len(rows.lengths)
        self.padding.append(1.0 - sum(rows.lengths) / total)
        self.longest.append(max(rows.lengths) / rows.width)
        self.mean_length.append(sum(rows.lengths) / len(rows.lengths))
        self.pad_value = rows.pad_value


def padded_rows(tensors: dict[str, Tensor]) -> dict[str, PaddedRows]:
    """Row lengths, by name, of the tensors of one batch that can hold padding.

    (B, T) integers and (B, T, F) floats. The pad value is what most rows end in (zero for float rows), and a row's length is the
    position after its last other value in any (B, T) tensor of the batch: a position is padding where all of them hold nothing
    but padding. A tensor of zeros and ones is a mask: it can tell that a position is none, and is no candidate. Constant tensors
    and those with equal rows (positions) tell nothing, but for a mask of ones. Rows padded on the left count as full: a crop
    would have to be on that side.
    """
    batch = {name: t.detach() for name, t in tensors.items() if _can_hold_padding(t)}
    masks = {name: t for name, t in batch.items() if t.dim() == 2 and is_mask(t)}
    tokens = {name: t for name, t in batch.items() if t.dim() == 2 and name not in masks and _has_own_rows(t)}
    found = {name: _without_trailing(t, _pad_value(t)) for name, t in tokens.items()}
    votes = [(t.shape, found[name].lengths) for name, t in tokens.items()]
    votes += [(t.shape, _of_mask(t, [ends for shape, ends in votes if shape == t.shape])) for t in masks.values()]
    found.update({name: _without_trailing(t, 0.0) for name, t in batch.items() if t.dim() == 3})
    for name, rows in found.items():
        tensor = batch[name]
        ends = [rows.lengths, *(ends for shape, ends in votes if shape == tensor.shape[:2] and any(ends))]
        full = (rows.width,) * len(rows.lengths)
        lengths = full if name in tokens and _is_left_padded(tensor, rows) else tuple(map(max, *ends, ends[0]))
        found[name] = rows._replace(lengths=lengths)
    return found


def is_mask(tensor: Tensor) -> bool:
    """Whether a (B, T) tensor holds nothing but zeros and ones."""
    if tensor.dim() != 2 or tensor.is_floating_point() or tensor.is_complex():
        return False
    return tensor.dtype == torch.bool or bool(((tensor == 0) | (tensor == 1)).all())


def _can_hold_padding(tensor: Tensor) -> bool:
    if tensor.dim() not in (2, 3) or tensor.shape[1] < _SMALLEST_WIDTH or tensor.shape[0] < 2:
        return False
    if tensor.numel() * tensor.element_size() > _LARGEST_BYTES or tensor.is_nested or tensor.is_sparse:
        return False
    is_index = not tensor.dtype.is_floating_point and not tensor.dtype.is_complex
    return (is_index or tensor.dim() == 3) and not is_wrapper(tensor)


def _has_own_rows(tensor: Tensor) -> bool:
    """Whether rows differ: equal ones (positions, one sequence repeated) do not show where each ends."""
    return not bool((tensor == tensor[:1]).all())


def _pad_value(tensor: Tensor) -> float:
    return float(tensor[:, -1].mode().values.item())


def _without_trailing(tensor: Tensor, pad: float) -> PaddedRows:
    """Row lengths up to the last value that is not `pad`."""
    differs = (tensor != pad).any(dim=2) if tensor.dim() == 3 else tensor != pad
    positions = torch.arange(1, tensor.shape[1] + 1, device=tensor.device)
    lengths = (differs * positions).amax(dim=1).tolist()
    return PaddedRows(int(tensor.shape[1]), tuple(int(n) for n in lengths), pad)


def _of_mask(mask: Tensor, lengths_of_tokens: list[tuple[int, ...]]) -> tuple[int, ...]:
    """Row lengths by a mask: up to its last one; up to its last zero where that is where tokens end (ones mark the padding)."""
    inverted = _without_trailing(mask, 1).lengths
    return inverted if inverted in lengths_of_tokens else _without_trailing(mask, 0).lengths


def _is_left_padded(tensor: Tensor, rows: PaddedRows) -> bool:
    """Whether rows begin with more equal values in all than they end in."""
    leading = _without_trailing(tensor.flip(1), float(tensor[:, 0].mode().values.item()))
    return sum(leading.lengths) < sum(rows.lengths)


def signs_of(module: nn.Module | None, tensors: list[Tensor], lengths: tuple[int, ...]) -> tuple[str, ...]:
    """What shows that trailing constants are padding: a padding_idx, a lengths tensor, a mask that ends where the rows end."""
    signs = []
    if module is not None and any(getattr(m, "padding_idx", None) is not None for m in module.modules()):
        signs.append("padding_idx")
    for tensor in tensors:
        if tensor.dim() == 1 and tensor.shape[0] == len(lengths) and not tensor.is_floating_point():
            if tuple(int(n) for n in tensor.tolist()) == lengths:
                signs.append("lengths")
        elif _can_hold_padding(tensor) and is_mask(tensor) and _of_mask(tensor.detach(), [lengths]) == lengths:
            signs.append("mask")
    return tuple(dict.fromkeys(signs))


def name_tensors(value: Any, name: str = "batch") -> dict[str, Tensor]:
    """The tensors in a batch or an argument list by a readable name ('batch[0]', 'input_ids')."""
    if isinstance(value, Tensor):
        return {name: value}
    found: dict[str, Tensor] = {}
    if isinstance(value, dict):
        for key, item in value.items():
            found.update(name_tensors(item, str(key)))
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            found.update(name_tensors(item, f"{name}[{index}]"))
    return found
