"""Bytes of a model's weights as they are stored, and of what a forward pass saves."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks


def stored_bytes(model: nn.Module) -> int:
    """Bytes of parameters and buffers, each storage once; of torchao's tensors those that they are packed in."""
    parts = [part for tensor in (*model.parameters(), *model.buffers()) for part in _plain_parts(tensor)]
    storages = {part.untyped_storage()._cdata: part.untyped_storage().nbytes() for part in parts}
    return sum(storages.values())


def saved_bytes(forward: Callable[[], Tensor], *, without: Iterable[object]) -> tuple[Tensor, int]:
    """What `forward` returns, and the bytes that autograd saves in it, each storage once; tensors of `without` do not count."""
    own = {t.untyped_storage().data_ptr() for t in without if isinstance(t, Tensor)}
    saved: dict[int, Tensor] = {}  # alive, so that no storage is counted at an address that another one had

    def pack(tensor: Tensor) -> Tensor:
        saved.setdefault(tensor.untyped_storage().data_ptr(), tensor.detach())
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        value = forward()
    return value, sum(t.untyped_storage().nbytes() for at, t in saved.items() if at not in own)


def _plain_parts(tensor: Tensor) -> list[Tensor]:
    """The plain tensors that a tensor with a class of its own consists of."""
    flatten = getattr(type(tensor), "__tensor_flatten__", None)
    if flatten is None:
        return [tensor]
    names, _ = flatten(tensor)
    return [part for name in names for part in _plain_parts(getattr(tensor, name))]
