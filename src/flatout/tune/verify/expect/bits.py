"""Two outcomes of one call, bit by bit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

import torch
from torch import Tensor

_WORDS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class BitDifference(NamedTuple):
    """A tensor that is not the same, and its first number that is not, in words."""

    name: str
    text: str


def differences(a: Mapping[str, Tensor], b: Mapping[str, Tensor], whose: str) -> Iterator[BitDifference]:
    """Every tensor whose bits are not the same; `whose` names the other side, b."""
    for name in dict.fromkeys((*a, *b)):
        if name not in a or name not in b:
            yield BitDifference(name, "there is none" if name not in a else f"{whose} has none")
        elif a[name].shape != b[name].shape or a[name].dtype != b[name].dtype:
            kinds = [f"{tuple(t.shape)} of {t.dtype}" for t in (a[name], b[name])]
            yield BitDifference(name, f"{kinds[0]}, {whose} {kinds[1]}")
        else:
            text = first_bit_difference(a[name], b[name], whose)
            if text:
                yield BitDifference(name, text)


def first_bit_difference(a: Tensor, b: Tensor, whose: str) -> str:
    """The first element whose bits differ, in words; empty when none does."""
    ours, theirs = _real(a), _real(b)
    differ = _bits(ours) != _bits(theirs)
    number = int(differ.sum())
    if not number:
        return ""
    return f"{first_pair(ours, theirs, differ, whose)}, {number} of {ours.numel()} numbers"


def first_pair(ours: Tensor, theirs: Tensor, where: Tensor, whose: str) -> str:
    """The numbers of two tensors at the first place where a mask holds, in words."""
    at = int(where.reshape(-1).to(torch.uint8).argmax())
    one, two = ours.reshape(-1)[at].item(), theirs.reshape(-1)[at].item()
    place = ", ".join(str(int(i)) for i in torch.unravel_index(torch.tensor(at), ours.shape)) if ours.dim() else ""
    return f"{one!r} instead of {whose}'s {two!r} at [{place}]"


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are equal bit for bit; a NaN equals itself."""
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(_bits(_real(a)), _bits(_real(b)))


def _real(tensor: Tensor) -> Tensor:
    """Dense; complex numbers as two, in a last dimension of their own."""
    dense = tensor.detach()
    dense = dense.to_dense() if dense.layout != torch.strided else dense
    return torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense


def _bits(tensor: Tensor) -> Tensor:
    flat = tensor.contiguous()
    return flat if flat.dtype == torch.bool else flat.view(_WORDS[flat.element_size()])
