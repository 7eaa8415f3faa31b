"""Tries a plan: makes the smaller model, runs it in float64, and compares it with the masked original.

That is the original at its full size in float64, with the removed units zero at every step: in each parameter and in each result.
It is the same as their absence wherever units are summed with weights. Norms and means count units, so there they are taken over
the units that stay.
"""

from __future__ import annotations

import copy
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from torch.fx import Interpreter, Node

from flatout.core.errors import PlanError
from flatout.core.records.prune import PruningPlan
from flatout.core.tensors.nests import tree_leaves
from flatout.shrink.float64_reference import float64_copy, relative_error_to_float64, to_float64
from flatout.shrink.prune.graph import owners_of
from flatout.shrink.prune.operator_rules import Shape, Value, shapes_in
from flatout.shrink.prune.surgery import apply_pruning, named_tensors, select_units
from flatout.shrink.prune.terms import Dim
from flatout.shrink.prune.ties import Tied

# Of float64 results of two orders of summation, relative to the output's largest number: rounding is near 1e-14 and grows with
# depth; a unit that is wrongly kept or lost shows far above.
TOLERANCE = 1e-8
_FAILURES = (RuntimeError, TypeError, ValueError, AssertionError, LookupError, AttributeError, ArithmeticError)

_COUNTING: Final = ("layer_norm", "rms_norm", "group_norm", "mean")
"""Operators that divide by the number of units."""


@dataclass(frozen=True)
class PruningTrial:
    """A plan that holds (`because` is empty), or why it does not."""

    plan: PruningPlan
    removed: frozenset[int]
    error: float = 0.0
    because: str = ""


@dataclass
class PruningProver:
    """Holds the original in float64, once with its own numbers and once with others, so that zeros hide nothing."""

    model: nn.Module
    inputs: Sequence[Tensor]
    num_state: int
    tied: Tied
    seed: int = 0
    _models: list[nn.Module] = field(default_factory=list)
    _inputs: tuple[Tensor, ...] = ()

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        own = float64_copy(self.model)
        inputs = list(to_float64(tuple(self.inputs)))
        for i in range(len(inputs) - self.num_state, len(inputs)):
            if inputs[i].is_floating_point():  # states of zeros would hide which unit is which
                inputs[i] = _drawn(inputs[i], generator)
        self._inputs = tuple(inputs)
        self._models = [_disturbed(own, generator), own]

    def trial(self, removed: frozenset[int]) -> PruningTrial:
        """Try without these variables: with the modules' own numbers set to what they seem to count, and else without."""
        counted = counted_attributes(self.model, self.tied, removed)
        alternatives = [counted, {}] if counted else [{}]
        if (num := sum(map(len, counted.values()))) > 1:
            alternatives += [{path: {name: size}} for path, own in counted.items() for name, size in own.items()][
                : 8 if num < 9 else 0
            ]
        trials = []
        for attributes in alternatives:
            trials.append(self.tried(plan_for(self.model, self.tied, removed, attributes), removed))
            if not trials[-1].because:
                return trials[-1]
        return trials[0]

    def tried(self, plan: PruningPlan, removed: frozenset[int]) -> PruningTrial:
        worst = 0.0
        for model in self._models:
            expected = self.expected(model, plan, removed)
            if not all(
                bool(torch.isfinite(t).all()) for t in expected if isinstance(t, Tensor) and t.is_floating_point()
            ):
                if model is self._models[0]:
                    continue  # other numbers do not suit this model
                return PruningTrial(plan, removed, because="the masked original is not finite on these inputs")
            try:
                found = self.found(apply_pruning(model, plan), plan)
            except _FAILURES as e:
                return PruningTrial(plan, removed, because=_failure(e))
            error = relative_error_to_float64(found, expected)
            worst = max(worst, error)
            if not error <= TOLERANCE:
                why = (
                    "gives outputs of another shape"
                    if error == float("inf")
                    else f"differs by {error:.1e} of its outputs"
                )
                return PruningTrial(plan, removed, error, f"the smaller model {why} from the masked original")
        return PruningTrial(plan, removed, worst)

    def expected(self, model: nn.Module, plan: PruningPlan, removed: frozenset[int]) -> list[object]:
        """What the masked original gives, carried states as the smaller model gives them."""
        outputs = masked_outputs(self.tied, model, self._inputs, set(removed))
        first = len(outputs) - self.num_state
        states = zip(outputs[first:], plan.states, strict=True)
        return outputs[:first] + [select_units(cast(Tensor, state), own) for state, own in states]

    def found(self, smaller: nn.Module, plan: PruningPlan) -> list[object]:
        first = len(self._inputs) - self.num_state
        states = [select_units(state, own) for state, own in zip(self._inputs[first:], plan.states, strict=True)]
        return outputs_of(smaller, (*self._inputs[:first], *states))


def outputs_of(model: nn.Module, inputs: Sequence[Tensor]) -> list[object]:
    """A model's outputs, flat, without gradients; the inputs are copied, for it may write into them."""
    with torch.no_grad():
        return tree_leaves(model(*(x.clone() for x in inputs)))


def _drawn(like: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(like.shape, generator=generator, dtype=torch.float64).to(like.device)


def _disturbed(model: nn.Module, generator: torch.Generator) -> nn.Module:
    """A copy whose floating tensors are all other, all different, and of about the same size; variances stay positive."""
    other = copy.deepcopy(model)
    with torch.no_grad():
        for name, tensor in [*other.named_parameters(), *other.named_buffers()]:
            if not tensor.is_floating_point() or not bool(torch.isfinite(tensor).all()):
                continue  # a mask of -inf stays what it is
            is_constant = not isinstance(tensor, nn.Parameter) and not name.endswith(("running_mean", "running_var"))
            if is_constant:
                continue
            size = max(float(tensor.std()) if tensor.numel() > 1 else 0.0, 0.05)
            tensor.add_(_drawn(tensor, generator) * size * 0.5)
            if name.endswith("running_var"):
                tensor.abs_().add_(0.5)
    return other


def _failure(error: Exception) -> str:
    """What the smaller model raised, and the line of the model's own code."""
    own = [
        f for f in traceback.extract_tb(error.__traceback__) if not any(p in f.filename for p in ("/torch/", "flatout"))
    ]
    lines = str(error).strip().splitlines() or [type(error).__name__]
    where = f" at {own[-1].filename.rsplit('/', 1)[-1]}:{own[-1].lineno}" if own else ""
    return f"the smaller model raises {type(error).__name__}{where}: {lines[0][:160]}"


def plan_for(
    model: nn.Module, tied: Tied, removed: frozenset[int], attributes: dict[str, dict[str, int]]
) -> PruningPlan:
    """The plan that takes these variables away."""
    tensors, terms = named_tensors(model), tied.terms
    remaining: dict[str, tuple[tuple[int, ...] | None, ...]] = {}
    for name, dims in tied.named.items():
        own = tuple(_indexes(terms.remaining(dim, removed), len(dim)) for dim in dims)
        if any(indexes is not None for indexes in own):
            remaining[name] = own
    attributes = {path: dict(own) for path, own in attributes.items()}
    for path, name, dim in tied.sizes:
        if (num := len(terms.remaining(dim, removed))) != len(dim):
            attributes.setdefault(path, {})[name] = num
    states = tuple(tuple(_indexes(terms.remaining(dim, removed), len(dim)) for dim in dims) for dims in tied.states)
    return PruningPlan(
        model=type(model).__name__,
        shapes={name: tuple(tensors[name].shape) for name in remaining},
        remaining=remaining,
        attributes=attributes,
        states=states,
    )


def _indexes(remaining: list[int], size: int) -> tuple[int, ...] | None:
    return None if len(remaining) == size else tuple(remaining)


def counted_attributes(model: nn.Module, tied: Tied, removed: frozenset[int]) -> dict[str, dict[str, int]]:
    """Whole numbers of the user's own modules that equal a size that changes where their code runs: heads, widths.

    It is a guess, and the trial decides.
    """
    modules = dict(model.named_modules())
    sizes: dict[str, dict[int, set[int]]] = {}
    for node, value in tied.values.items():
        changed: dict[int, int] = {}
        for shape in shapes_in(value):
            cut = [dim for dim in shape.dims if not removed.isdisjoint(tied.terms.variables(dim))]
            changed |= {len(dim): len(tied.terms.remaining(dim, removed)) for dim in cut}
        for path in owners_of(node) if changed else ():
            for old, new in changed.items():
                sizes.setdefault(path, {}).setdefault(old, set()).add(new)
    found: dict[str, dict[str, int]] = {}
    for path, own in sizes.items():
        module = modules.get(path)
        if module is None or type(module).__module__.startswith("torch.nn"):
            continue
        for name, number in vars(module).items():
            if type(number) is int and len(own.get(number, ())) == 1:
                found.setdefault(path, {})[name] = next(iter(own[number]))
    return found


def refuse_unequal(model: nn.Module, inputs: Sequence[Tensor], tied: Tied) -> None:
    """The graph has to give what the model gives, or nothing found on it holds.

    Raises PlanError where it does not: the model draws random numbers, or depends on more than its inputs.
    """
    own, inputs64 = float64_copy(model), to_float64(tuple(inputs))
    if (
        not relative_error_to_float64(outputs_of(own, inputs64), masked_outputs(tied, own, inputs64, set()))
        <= TOLERANCE
    ):
        raise PlanError(
            f"the exported graph of {type(model).__name__} does not give what the module gives; "
            "forward must depend on its inputs alone, without random numbers in eval mode"
        )


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
