"""The reference: the original model at its full size in float64, with the removed units zero at every step.

A removed unit is zero in each parameter and in each result. That is the same as its absence wherever units are summed with
weights. Norms and means count units, so there they are taken over the units that stay.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Interpreter, Node

from flatout.compression.pruning.calls import Shape, Value
from flatout.compression.pruning.terms import Dim
from flatout.compression.pruning.tying import Tied


def masked_outputs(tied: Tied, model: nn.Module, inputs: Sequence[Tensor], removed: set[int]) -> list[object]:
    """What the model, a float64 copy, gives without the removed units; carried states come back at their full size."""
    tensors = {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }
    graph = tied.graph
    given = dict(zip(graph.inputs, inputs, strict=True))
    values: list[object] = []
    with torch.no_grad():
        for node in graph.nodes:
            if node.op != "placeholder":
                continue
            known = given.get(node.name, graph.constants.get(node.name))
            value = tensors[graph.named[node.name]].detach() if node.name in graph.named else known
            values.append(value.clone() if isinstance(value, Tensor) else value)
        run = _Masked(tied, removed)
        run.run(*values)
    return run.returned


class _Masked(Interpreter):
    def __init__(self, tied: Tied, removed: set[int]) -> None:
        super().__init__(tied.graph.module, garbage_collect_values=False)
        self._tied, self._removed = tied, removed
        self._outputs = tied.graph.outputs
        self.returned: list[object] = []
        self._masks: dict[int, Tensor | None] = {}  # by the identity of dimensions, which the values keep alive

    def run_node(self, n: Node) -> Any:
        if n.op == "output":
            self.returned = [None if node is None else self.env[node] for node in self._outputs]
            return super().run_node(n)
        counted = self._counted(n)
        result = super().run_node(n) if counted is None else counted
        if not _is_view(n):
            return self._zeroed(result, self._tied.values.get(n))
        return result

    def _mask(self, dim: Dim) -> Tensor | None:
        """1 for the units that stay; None where all do."""
        if id(dim) not in self._masks:
            self._masks[id(dim)] = self._made_mask(dim)
        return self._masks[id(dim)]

    def _made_mask(self, dim: Dim) -> Tensor | None:
        kept = self._tied.terms.kept(dim, self._removed)
        if len(kept) == len(dim):
            return None
        mask = torch.zeros(len(dim), dtype=torch.bool)
        mask[kept] = True
        return mask

    def _zeroed(self, result: Any, value: Value) -> Any:
        if isinstance(value, list) and isinstance(result, (list, tuple)):
            return [self._zeroed(r, v) for r, v in zip(result, value, strict=True)]
        if not isinstance(value, Shape) or not isinstance(result, Tensor):
            return result
        for place, dim in enumerate(value.dims):
            if (mask := self._mask(dim)) is not None:
                if any(stride == 0 and size > 1 for size, stride in zip(result.shape, result.stride(), strict=True)):
                    result = result.clone()
                shape = [-1 if d == place else 1 for d in range(result.dim())]
                result.masked_fill_(~mask.to(result.device).view(shape), 0)
        return result

    def _counted(self, n: Node) -> Tensor | None:
        """The result of an operator that counts units, where some are gone."""
        schema = getattr(n.target, "_schema", None)
        name = "" if schema is None else str(schema.name).removeprefix("aten::")
        if name not in _COUNTING or not isinstance(value := self._tied.values.get(n.args[0]), Shape):  # type: ignore[arg-type]
            return None
        masks = [self._mask(dim) for dim in value.dims]
        if all(mask is None for mask in masks):
            return None
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        named = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}  # type: ignore[union-attr]
        named |= {a.name: v for a, v in zip(schema.arguments, args, strict=False)} | kwargs  # type: ignore[union-attr]
        x = args[0]
        whole = [
            torch.ones(size, dtype=x.dtype, device=x.device) if mask is None else mask.to(x)
            for mask, size in zip(masks, x.shape, strict=True)
        ]
        return _COUNTING[name](x, whole, named)


def _is_view(n: Node) -> bool:
    """Does it give another view of what was zeroed before? Zeroing that again through an expanded view is not possible."""
    schema = getattr(n.target, "_schema", None)
    returns = [] if schema is None else schema.returns
    return bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)


def _mean_over(x: Tensor, masks: list[Tensor], dims: list[int]) -> Tensor:
    """The mean over the units that stay, dimensions kept."""
    num = 1.0
    for d in dims:
        x = x * masks[d].view([-1 if i == d else 1 for i in range(x.dim())])
        num *= float(masks[d].sum())
    return x.sum(dims, keepdim=True) / num


def _layer_norm(x: Tensor, masks: list[Tensor], named: dict[str, Any]) -> Tensor:
    over = list(range(x.dim() - len(named["normalized_shape"]), x.dim()))
    centred = x - _mean_over(x, masks, over)
    y = centred / torch.sqrt(_mean_over(centred**2, masks, over) + named["eps"])
    y = y if named["weight"] is None else y * named["weight"]
    return y if named["bias"] is None else y + named["bias"]


def _rms_norm(x: Tensor, masks: list[Tensor], named: dict[str, Any]) -> Tensor:
    over = list(range(x.dim() - len(named["normalized_shape"]), x.dim()))
    eps = torch.finfo(x.dtype).eps if named["eps"] is None else named["eps"]
    y = x / torch.sqrt(_mean_over(x**2, masks, over) + eps)
    return y if named["weight"] is None else y * named["weight"]


def _group_norm(x: Tensor, masks: list[Tensor], named: dict[str, Any]) -> Tensor:
    num_groups, shape = named["num_groups"], x.shape
    z = x.reshape(shape[0], num_groups, -1)
    mask = masks[1].view(1, -1, *([1] * (x.dim() - 2))).expand_as(x).reshape(z.shape)
    num = mask.sum(-1, keepdim=True)
    centred = z - (z * mask).sum(-1, keepdim=True) / num
    y = centred / torch.sqrt((centred**2 * mask).sum(-1, keepdim=True) / num + named["eps"])
    y, wide = y.reshape(shape), (-1, *([1] * (x.dim() - 2)))
    y = y if named["weight"] is None else y * named["weight"].view(wide)
    return y if named["bias"] is None else y + named["bias"].view(wide)


def _mean(x: Tensor, masks: list[Tensor], named: dict[str, Any]) -> Tensor:
    dim = named.get("dim")
    dims = list(range(x.dim())) if dim is None or dim == [] else [d % x.dim() for d in dim]
    y = _mean_over(x, masks, dims)
    return y if named.get("keepdim") else y.squeeze(dims)


_COUNTING: dict[str, Callable[[Tensor, list[Tensor], dict[str, Any]], Tensor]] = {
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    "group_norm": _group_norm,
    "mean": _mean,
}
