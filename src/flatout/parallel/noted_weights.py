"""Weights that autograd saves for the backward, noted instead of held."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Saved(NamedTuple):
    """Where in which weight a tensor that autograd saved lies, and the weight's version then; nothing that holds memory."""

    which: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    version: int


class _Kept(NamedTuple):
    """Another tensor that autograd saved, and its version then: with hooks autograd does not look for changes in place itself."""

    tensor: Tensor
    version: int


class NotedWeights:
    """Inside this `with`, autograd notes which of `weights` it saves, and asks `read` for it in the backward.

    A weight is known by its memory, so views of it are noted, too. `versions` are those that `read` may compare. Other tensors
    go to the hooks around this one (recompute, offload of activations), or are held as ever.
    """

    def __init__(self, weights: Sequence[Tensor], versions: Sequence[int], read: Callable[[Saved], Tensor]) -> None:
        self._device, self._read = weights[0].device, read
        self._index = {w.untyped_storage().data_ptr(): i for i, w in enumerate(weights) if w.numel()}
        self._versions, self._dtypes = [*versions], [w.dtype for w in weights]
        outer = torch._C._autograd._top_saved_tensors_default_hooks(True)
        self._outer_pack, self._outer_unpack = outer if outer is not None else (_kept, _given)
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def __enter__(self) -> None:
        self._hooks.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._hooks.__exit__(*error)

    def _pack(self, tensor: Tensor) -> Any:
        if tensor.layout is torch.strided and tensor.device == self._device and tensor.numel():
            index = self._index.get(tensor.untyped_storage().data_ptr())
            if (
                index is not None
                and tensor.dtype == self._dtypes[index]
                and not tensor.is_conj()
                and not tensor.is_neg()
            ):
                offset = int(tensor.storage_offset())
                return Saved(index, tuple(tensor.shape), tensor.stride(), offset, self._versions[index])
        return self._outer_pack(tensor)

    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, Saved):
            return self._read(packed)
        tensor: Tensor = self._outer_unpack(packed)
        return tensor


def _kept(tensor: Tensor) -> _Kept:
    return _Kept(tensor.detach(), tensor._version)  # itself it would hold its own node, and never go


def _given(kept: _Kept) -> Tensor:
    if kept.tensor._version != kept.version:
        raise RuntimeError(
            f"a tensor of shape {list(kept.tensor.shape)} that a backward needs was changed in place: it is at version "
            f"{kept.tensor._version}, and was saved at {kept.version}"
        )
    return kept.tensor
