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


def padded_rows(tensor: Tensor) -> PaddedRows | None:
    """Row lengths of a (B, T) integer or bool tensor or a (B, T, F) float tensor; None when it cannot hold padding.

    The pad value is what most rows end in (zero for float rows). A row's length is the position after its last other value.
    """
    if tensor.dim() not in (2, 3) or tensor.shape[1] < _SMALLEST_WIDTH or tensor.shape[0] < 2:
        return None
    if (
        tensor.numel() * tensor.element_size() > _LARGEST_BYTES
        or tensor.is_nested
        or tensor.is_sparse
        or is_wrapper(tensor)
    ):
        return None
    is_index = not tensor.dtype.is_floating_point and not tensor.dtype.is_complex
    if tensor.dim() == 2 and not is_index:
        return None
    values = tensor.detach()
    if tensor.dim() == 3:
        pad = 0.0
        differs = (values != 0).any(dim=2)
    else:
        last = values[:, -1]
        pad = float(last.mode().values.item()) if values.dtype != torch.bool else 0.0
        differs = values != (values.new_tensor(pad) if values.dtype != torch.bool else False)
    positions = torch.arange(1, tensor.shape[1] + 1, device=tensor.device)
    lengths = (differs * positions).amax(dim=1).tolist()
    return PaddedRows(int(tensor.shape[1]), tuple(int(n) for n in lengths), pad)


def signs_of(module: nn.Module | None, tensors: list[Tensor], lengths: tuple[int, ...]) -> tuple[str, ...]:
    """What shows that trailing constants are padding: a padding_idx, a lengths tensor, a mask."""
    signs = []
    if module is not None and any(getattr(m, "padding_idx", None) is not None for m in module.modules()):
        signs.append("padding_idx")
    for tensor in tensors:
        if tensor.dim() == 1 and tensor.shape[0] == len(lengths) and not tensor.is_floating_point():
            if tuple(int(n) for n in tensor.tolist()) == lengths:
                signs.append("lengths")
        elif tensor.dtype == torch.bool and tensor.dim() == 2:
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
