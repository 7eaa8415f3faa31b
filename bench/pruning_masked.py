"""An own masked reference for bench/pruning.py: the original module with dead slices, and norms over the units that stay.

Which units stay is read off the smaller model's numbers: all of a model's numbers are different here, so each tells where it came
from. Nothing of flatout or torch-pruning is used.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

Kept = dict[str, list[list[int]]]


def disturb(model: nn.Module, *, seed: int = 0) -> None:
    """Give every number another value: norms of ones and biases of zeros would hide mistakes."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if tensor.is_floating_point():
                tensor.add_(torch.randn(tensor.shape, generator=generator) * 0.1)
                if name.endswith("running_var"):
                    tensor.abs_().add_(0.5)


def recovered(original: nn.Module, smaller: nn.Module) -> Kept | None:
    """Indexes that stay, by tensor and dimension; None where the smaller model holds other numbers."""
    before = dict(original.named_parameters()) | dict(original.named_buffers())
    after = dict(smaller.named_parameters()) | dict(smaller.named_buffers())
    kept: Kept = {}
    for name, tensor in after.items():
        if tensor.is_floating_point():
            found = _places(before[name].detach(), tensor.detach())
            if found is None:
                return None
            kept[name] = found
    return kept


def _places(before: Tensor, after: Tensor) -> list[list[int]] | None:
    order = before.flatten().sort()
    at = torch.searchsorted(order.values, after.flatten().contiguous()).clamp(max=before.numel() - 1)
    places = torch.unravel_index(order.indices[at], before.shape)
    kept = []
    for dim, size in enumerate(after.shape):
        along = places[dim].view(after.shape).movedim(dim, 0).reshape(size, -1)
        kept.append(along.mode(1).values.tolist())
    again = before
    for dim, own in enumerate(kept):
        again = again.index_select(dim, torch.tensor(own))
    return kept if torch.equal(again, after) else None


class _Norm(nn.Module):
    """A layer or group norm over the units that stay."""

    def __init__(self, norm: nn.LayerNorm | nn.GroupNorm, kept: list[int]) -> None:
        super().__init__()
        self.norm, self.eps = norm, norm.eps
        self.weight, self.bias = norm.weight, norm.bias  # torch's encoder asks for them
        mask = torch.zeros(len(norm.weight), dtype=torch.float64)
        mask[kept] = 1
        self.register_buffer("mask", mask)

    def forward(self, x: Tensor) -> Tensor:
        is_group = isinstance(self.norm, nn.GroupNorm)
        wide = (-1, *([1] * (x.dim() - 2))) if is_group else (-1,)
        mask, num_groups = self.mask.view(wide).expand_as(x), self.norm.num_groups if is_group else 1
        shape = (x.shape[0], num_groups, -1) if is_group else x.shape
        y, m = (x * mask).reshape(shape), mask.reshape(shape)
        num = m.sum(-1, keepdim=True)
        centred = (y - y.sum(-1, keepdim=True) / num) * m
        y = (centred / torch.sqrt((centred**2).sum(-1, keepdim=True) / num + self.norm.eps)).reshape(x.shape)
        return y * self.norm.weight.view(wide) + self.norm.bias.view(wide)


def masked(original: nn.Module, kept: Kept) -> nn.Module:
    """The original in float64, dead where the smaller model has nothing."""
    model = copy.deepcopy(original).double().eval()
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    with torch.no_grad():
        for name, dims in kept.items():
            for dim, own in enumerate(dims):
                gone = sorted(set(range(tensors[name].shape[dim])) - set(own))
                tensors[name].index_fill_(dim, torch.tensor(gone, dtype=torch.long), 0.0)
    for path, module in list(model.named_modules()):
        if isinstance(module, (nn.LayerNorm, nn.GroupNorm)):
            parent = model.get_submodule(path.rpartition(".")[0])
            setattr(parent, path.rpartition(".")[2], _Norm(module, kept[f"{path}.weight"][0]))
    return model


def error(
    original: nn.Module, smaller: nn.Module, inputs: tuple[Tensor, ...], narrow: tuple[Tensor, ...]
) -> float | None:
    """Of the first output, over its largest number; None where the smaller model's numbers are not the original's."""
    kept = recovered(original, smaller)
    if kept is None:
        return None
    with torch.enable_grad():  # without gradients torch's encoder takes a path that goes round the norms
        expected = masked(original, kept)(*_double(inputs))
    with torch.no_grad():
        found = copy.deepcopy(smaller).double().eval()(*_double(narrow))
    a, b = (y[0] if isinstance(y, tuple) else y for y in (found, expected))
    return float((a - b).abs().max() / b.abs().max()) if a.shape == b.shape else float("inf")


def _double(inputs: tuple[Tensor, ...]) -> list[Tensor]:
    return [x.double() if x.is_floating_point() else x for x in inputs]
