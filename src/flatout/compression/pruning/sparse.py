"""Sparse weights, only where a kernel makes them faster: each layer is timed beside its dense self and refused otherwise."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flatout.errors import UsageError
from flatout.measure.timer import Clock, compare
from flatout.records.pruning import SparseLayer


class Sparsified(NamedTuple):
    """A copy of the model, its layers with zeros where they were made sparse, and what was tried."""

    model: nn.Module
    layers: tuple[SparseLayer, ...]


class SparseLinear(nn.Module):
    """A linear layer whose weight is stored without its zeros; for inference, the weight takes no gradient."""

    def __init__(self, weight: Tensor, bias: Tensor | None, *, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.out_features, self.in_features = weight.shape
        self.weight = nn.Parameter(_stored(weight.detach(), kind), requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias.detach().clone(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        if self.kind == "2:4":
            return F.linear(x, self.weight, self.bias)
        flat = x.reshape(-1, self.in_features)
        y = torch.mv(self.weight, flat[0]).unsqueeze(0) if len(flat) == 1 else torch.mm(self.weight, flat.t()).t()
        y = y if self.bias is None else y + self.bias
        return y.reshape(*x.shape[:-1], self.out_features)


def sparsify(
    model: nn.Module,
    inputs: tuple[Tensor, ...],
    *,
    kind: Literal["2:4", "unstructured"] = "unstructured",
    density: float = 0.1,
    keep: tuple[str, ...] = (),
    min_time_s: float = 0.1,
    clock: Clock | None = None,
) -> Sparsified:
    """A copy of `model`, for inference, with sparse linear layers where these are faster on `inputs`, on this machine.

    "2:4" keeps the two largest of each four weights along the inputs (GPUs whose matrix units know it: float16, bfloat16);
    "unstructured" keeps the largest `density` of all weights, as CSR (a CPU). Each layer is run sparse and dense in turn on
    the input it gets from the model; it is made sparse only if the upper end of the ratio's interval is below 1. A layer that is
    refused keeps its weights, all of them, and the reason with both times is in its record.

    Accuracy is not looked at. Raises UsageError for a density outside 0..1 or inputs on a device without such a kernel.
    """
    if not 0 < density < 1:
        raise UsageError(f"density {density} is outside 0..1; it is the share of weights that stay")
    smaller = copy.deepcopy(model).eval()
    device = next(smaller.parameters()).device
    if (kind == "2:4") != (device.type == "cuda"):
        raise UsageError(
            f"kind '{kind}' has no kernel on '{device.type}'; 'unstructured' is for a CPU, '2:4' for a GPU"
        )
    seen = _inputs_of(smaller, inputs)
    layers: list[SparseLayer] = []
    for path, module in list(smaller.named_modules()):
        if type(module) is not nn.Linear or any(fnmatchcase(path, pattern) for pattern in keep):
            continue
        made, record = _tried(path, module, seen, kind=kind, density=density, min_time_s=min_time_s, clock=clock)
        layers.append(record)
        if made is not None:
            setattr(smaller.get_submodule(path.rpartition(".")[0]), path.rpartition(".")[2], made)
    return Sparsified(smaller, tuple(layers))


def _inputs_of(model: nn.Module, inputs: tuple[Tensor, ...]) -> Mapping[str, Tensor]:
    """What each linear layer gets, the last time it is called."""
    seen: dict[str, Tensor] = {}

    def look(path: str, x: Tensor) -> None:
        seen[path] = x.detach().clone()

    handles = [
        module.register_forward_pre_hook(lambda _, args, path=path: look(path, args[0]))
        for path, module in model.named_modules()
        if type(module) is nn.Linear
    ]
    try:
        with torch.no_grad():
            model(*inputs)
    finally:
        for handle in handles:
            handle.remove()
    return seen


def _tried(
    path: str,
    module: nn.Linear,
    seen: Mapping[str, Tensor],
    *,
    kind: str,
    density: float,
    min_time_s: float,
    clock: Clock | None,
) -> tuple[SparseLinear | None, SparseLayer]:
    def refused(because: str) -> tuple[None, SparseLayer]:
        return None, SparseLayer(name=path, is_sparse=False, because=because, density=1.0)

    if path not in seen:
        return refused("it was not called on the inputs")
    if because := _unfit(module, kind):
        return refused(because)
    thin = thinned(module.weight.detach(), kind=kind, density=density)
    made, x = SparseLinear(thin, module.bias, kind=kind), seen[path]
    with torch.inference_mode():
        calls = {"dense": lambda: module(x), "sparse": lambda: made(x)}
        times = compare(calls, device=x.device, min_time_s=min_time_s, clock=clock)
    ratio, dense_s, sparse_s = times["sparse"].ratio, times["dense"].call_s.value, times["sparse"].call_s.value
    is_faster = ratio is not None and ratio.high < 1
    told = f"sparse {sparse_s * 1e6:.1f} us, dense {dense_s * 1e6:.1f} us"
    return made if is_faster else None, SparseLayer(
        name=path,
        is_sparse=is_faster,
        because=told if is_faster else f"not faster: {told}",
        density=float((thin != 0).double().mean()),
        dense_s=dense_s,
        sparse_s=sparse_s,
        ratio=None if ratio is None else (ratio.value, ratio.low, ratio.high),
    )


def _unfit(module: nn.Linear, kind: str) -> str:
    """Why this layer cannot be stored so; torch's 2:4 kernels take 16-bit weights in tiles of 32 x 64."""
    if kind == "unstructured":
        return (
            "" if module.weight.dtype in (torch.float32, torch.float64) else f"no CSR kernel for {module.weight.dtype}"
        )
    if module.weight.dtype not in (torch.float16, torch.bfloat16):
        return f"2:4 kernels take float16 and bfloat16, the weight is {module.weight.dtype}"
    rows, columns = module.weight.shape
    return "" if rows % 32 == 0 and columns % 64 == 0 else f"{rows} x {columns} is not a multiple of 32 x 64"


def thinned(weight: Tensor, *, kind: str, density: float) -> Tensor:
    """The weight with zeros in place of the smallest.

    >>> thinned(torch.tensor([[1.0, -4.0, 3.0, 2.0]]), kind="2:4", density=0.5).tolist()
    [[0.0, -4.0, 3.0, 0.0]]
    """
    if kind == "2:4":
        fours = weight.reshape(-1, 4)
        largest = fours.abs().topk(2, dim=1).indices
        return torch.zeros_like(fours).scatter(1, largest, fours.gather(1, largest)).reshape(weight.shape)
    num = max(1, round(density * weight.numel()))
    flat = weight.reshape(-1)
    largest = flat.abs().topk(num).indices
    return torch.zeros_like(flat).scatter(0, largest, flat[largest]).reshape(weight.shape)


def _stored(weight: Tensor, kind: str) -> Tensor:
    if kind == "2:4":
        found: Tensor = torch.sparse.to_sparse_semi_structured(weight.contiguous())
        return found
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse (CSR|invariant)")  # said once: CSR is beta, unchecked
        return weight.to_sparse_csr()
