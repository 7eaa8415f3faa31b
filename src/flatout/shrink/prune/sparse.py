"""Sparse weights, only where a kernel makes them faster: each layer is timed beside its dense self and refused otherwise."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from functools import partial
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flatout.core.errors import UsageError
from flatout.core.records.prune import SparseLayer
from flatout.machine.measure.timer import TimerClock, Timing, compare_times
from flatout.shrink.layer_calls import layer_calls


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
        """Outputs [..., out] of inputs [..., in], as nn.Linear has them."""
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
    clock: TimerClock | None = None,
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
    linear = [path for path, module in smaller.named_modules() if type(module) is nn.Linear]
    calls = layer_calls(smaller, linear, inputs)
    layers: list[SparseLayer] = []
    for path, module in list(smaller.named_modules()):
        if type(module) is not nn.Linear or any(fnmatchcase(path, pattern) for pattern in keep):
            continue
        because = _unfit(module, kind) if path in calls else "it was not called on the inputs"
        if because:
            layers.append(SparseLayer(name=path, is_sparse=False, because=because, density=1.0))
            continue
        thin = thinned(module.weight.detach(), kind=kind, density=density)
        sparse, x = SparseLinear(thin, module.bias, kind=kind), calls[path].first[0].args[0]
        runs: dict[str, Callable[[], object]] = {"dense": partial(module, x), "sparse": partial(sparse, x)}
        with torch.inference_mode():
            times = compare_times(runs, device=x.device, min_time_s=min_time_s, clock=clock)
        layers.append(_record(path, times, density=float((thin != 0).double().mean())))
        if layers[-1].is_sparse:
            setattr(smaller.get_submodule(path.rpartition(".")[0]), path.rpartition(".")[2], sparse)
    return Sparsified(smaller, tuple(layers))


def _record(path: str, times: Mapping[str, Timing], *, density: float) -> SparseLayer:
    ratio, dense_s, sparse_s = times["sparse"].ratio, times["dense"].call_s.value, times["sparse"].call_s.value
    is_faster = ratio is not None and ratio.high < 1
    times_text = f"sparse {sparse_s * 1e6:.1f} us, dense {dense_s * 1e6:.1f} us"
    return SparseLayer(
        name=path,
        is_sparse=is_faster,
        because=times_text if is_faster else f"not faster: {times_text}",
        density=density,
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
