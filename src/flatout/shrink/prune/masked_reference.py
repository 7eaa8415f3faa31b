"""The reference: the original model at its full size in float64, with the removed units zero at every step.

A removed unit is zero in each parameter and in each result. That is the same as its absence wherever units are summed with
weights. Norms and means count units, so there they are taken over the units that stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.fx import Interpreter, Node

from flatout.shrink.prune.operator_rules import Shape, Value
from flatout.shrink.prune.surgery import named_tensors
from flatout.shrink.prune.terms import Dim
from flatout.shrink.prune.ties import Tied

_COUNTING: Final = ("layer_norm", "rms_norm", "group_norm", "mean")
"""Operators that divide by the number of units."""


def masked_outputs(tied: Tied, model: nn.Module, inputs: Sequence[Tensor], removed: set[int]) -> list[object]:
    """What the model, a float64 copy, gives without the removed units; carried states come back at their full size."""
    graph, tensors = tied.graph, named_tensors(model)
    known = {**graph.constants, **dict(zip(graph.inputs, inputs, strict=True))}
    known |= {name: tensors[path] for name, path in graph.named.items()}
    values = [known.get(node.name) for node in graph.nodes if node.op == "placeholder"]
    run = _Masked(tied, removed)
    with torch.no_grad():
        run.run(*(value.detach().clone() if isinstance(value, Tensor) else value for value in values))
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
        result = self._counted(n) if self._is_counting(n) else super().run_node(n)
        return result if _is_view(n) else self._zeroed(result, self._tied.values.get(n))

    def _mask(self, dim: Dim) -> Tensor | None:
        """1 for the units that stay; None where all do."""
        if id(dim) not in self._masks:
            remaining = self._tied.terms.remaining(dim, self._removed)
            mask = torch.zeros(len(dim), dtype=torch.bool)
            mask[remaining] = True
            self._masks[id(dim)] = None if len(remaining) == len(dim) else mask
        return self._masks[id(dim)]

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

    def _is_counting(self, n: Node) -> bool:
        """Does the operator count units, some of which are gone?"""
        name = getattr(getattr(n.target, "_schema", None), "name", "").removeprefix("aten::")
        value = self._tied.values.get(n.args[0]) if name in _COUNTING else None  # type: ignore[arg-type]
        return isinstance(value, Shape) and any(self._mask(dim) is not None for dim in value.dims)

    def _counted(self, n: Node) -> Tensor:
        """The operator's result over the units that stay: of a norm without weights, which are then applied at full size."""
        schema: Any = n.target._schema  # type: ignore[union-attr]
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        named = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
        named |= {a.name: value for a, value in zip(schema.arguments, args, strict=False)} | kwargs
        value, x = self._tied.values[n.args[0]], args[0]  # type: ignore[index]
        masks = [self._mask(dim) for dim in value.dims] if isinstance(value, Shape) else []
        if schema.name == "aten::mean":  # what is gone is zero already, but was counted
            over = range(x.dim()) if not named.get("dim") else [d % x.dim() for d in named["dim"]]
            num = prod(x.shape[d] / int(mask.sum()) for d in over if (mask := masks[d]) is not None)
            return super().run_node(n) * num  # type: ignore[no-any-return]
        gone = [(d, mask.nonzero().flatten().to(x.device)) for d, mask in enumerate(masks) if mask is not None]
        y = x
        for d, places in gone:
            y = y.index_select(d, places)
        weights = {name: named[name] for name in ("weight", "bias") if named.get(name) is not None}
        own = {"normalized_shape": y.shape[-len(named["normalized_shape"]) :]} if "normalized_shape" in named else {}
        y = n.target(**(named | dict.fromkeys(weights) | own | {"input": y}))  # type: ignore[operator]
        for d, places in gone:
            y = y.new_zeros(*y.shape[:d], x.shape[d], *y.shape[d + 1 :]).index_copy(d, places, y)
        for name, weight in weights.items():
            wide = weight if own else weight.view(-1, *(1,) * (x.dim() - 2))
            y = y * wide if name == "weight" else y + wide
        return y  # type: ignore[no-any-return]


def _is_view(n: Node) -> bool:
    """Does it give another view of what was zeroed before? Zeroing that again through an expanded view is not possible."""
    schema = getattr(n.target, "_schema", None)
    returns = [] if schema is None else schema.returns
    return bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)
