"""Tries a plan: makes the smaller model, runs it in float64, and compares it with the masked original."""

from __future__ import annotations

import copy
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor, nn

from flatout.core.errors import PlanError
from flatout.core.records.prune import PruningPlan
from flatout.core.tensors.nests import tree_leaves
from flatout.shrink.float64_reference import float64_copy, relative_error_to_float64, to_float64
from flatout.shrink.prune.graph import ExportedGraph, owners_of
from flatout.shrink.prune.masked_reference import masked_outputs
from flatout.shrink.prune.operator_rules import shapes_in
from flatout.shrink.prune.surgery import apply_pruning, named_tensors, select_units
from flatout.shrink.prune.ties import Tied

# Of float64 results of two orders of summation, relative to the output's largest number: rounding is near 1e-14 and grows with
# depth; a unit that is wrongly kept or lost shows far above.
TOLERANCE = 1e-8
_FAILURES = (RuntimeError, TypeError, ValueError, AssertionError, LookupError, AttributeError, ArithmeticError)


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


def refuse_unequal(model: nn.Module, graph: ExportedGraph, inputs: Sequence[Tensor], tied: Tied) -> None:
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
