"""Tries a plan: makes the smaller model, runs it in float64, and compares it with the masked original."""

from __future__ import annotations

import copy
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from flatout.compression.pruning.calls import shapes_in
from flatout.compression.pruning.cutting import apply_pruning, named_tensors, sliced
from flatout.compression.pruning.graph import Graph, flat_outputs, in_float64, owners_of, to_float64
from flatout.compression.pruning.masked import masked_outputs
from flatout.compression.pruning.terms import Dim
from flatout.compression.pruning.tying import Tied
from flatout.errors import PlanError
from flatout.records.pruning import PruningPlan

# Of float64 results of two orders of summation, relative to the output's largest number: rounding is near 1e-14 and grows with
# depth; a unit that is wrongly kept or lost shows far above.
TOLERANCE = 1e-8
_FAILURES = (RuntimeError, TypeError, ValueError, AssertionError, LookupError, AttributeError, ArithmeticError)


@dataclass(frozen=True)
class Trial:
    """A plan that holds (`because` is empty), or why it does not."""

    plan: PruningPlan
    removed: frozenset[int]
    error: float = 0.0
    because: str = ""


@dataclass
class Prover:
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
        own = in_float64(self.model)
        inputs = list(to_float64(self.inputs))
        for i in range(len(inputs) - self.num_state, len(inputs)):
            if inputs[i].is_floating_point():  # states of zeros would hide which unit is which
                inputs[i] = _drawn(inputs[i], generator)
        self._inputs = tuple(inputs)
        self._models = [_disturbed(own, generator), own]

    def trial(self, removed: frozenset[int]) -> Trial:
        """Without these variables: with the modules' own numbers set to what they seem to count, and else without."""
        counted = counted_attributes(self.model, self.tied, removed)
        choices = [counted, {}] if counted else [{}]
        if (num := sum(map(len, counted.values()))) > 1:
            choices += [{path: {name: size}} for path, own in counted.items() for name, size in own.items()][
                : 8 if num < 9 else 0
            ]
        trials = []
        for attributes in choices:
            trials.append(self.tried(plan_for(self.model, self.tied, removed, attributes), removed))
            if not trials[-1].because:
                return trials[-1]
        return trials[0]

    def tried(self, plan: PruningPlan, removed: frozenset[int]) -> Trial:
        worst = 0.0
        for model in self._models:
            expected = self.expected(model, plan, removed)
            if not all(
                bool(torch.isfinite(t).all()) for t in expected if isinstance(t, Tensor) and t.is_floating_point()
            ):
                if model is self._models[0]:
                    continue  # other numbers do not suit this model
                return Trial(plan, removed, because="the masked original is not finite on these inputs")
            try:
                found = self.found(apply_pruning(model, plan), plan)
            except _FAILURES as e:
                return Trial(plan, removed, because=_told(e))
            error = distance(found, expected)
            worst = max(worst, error)
            if not error <= TOLERANCE:
                why = (
                    "gives outputs of another shape"
                    if error == float("inf")
                    else f"differs by {error:.1e} of its outputs"
                )
                return Trial(plan, removed, error, f"the smaller model {why} from the masked original")
        return Trial(plan, removed, worst)

    def expected(self, model: nn.Module, plan: PruningPlan, removed: frozenset[int]) -> list[object]:
        outputs = masked_outputs(self.tied, model, self._narrow(self._inputs, plan, is_masked=True), set(removed))
        first = len(outputs) - self.num_state
        for i in range(self.num_state):
            whole = outputs[first + i]
            assert isinstance(whole, Tensor)
            outputs[first + i] = sliced(whole, plan.states[i])
        return outputs

    def found(self, smaller: nn.Module, plan: PruningPlan) -> list[object]:
        with torch.no_grad():
            return flat_outputs(smaller(*self._narrow(self._inputs, plan, is_masked=False)))

    def _narrow(self, inputs: Sequence[Tensor], plan: PruningPlan, *, is_masked: bool) -> tuple[Tensor, ...]:
        """States as the smaller model takes them; the reference's are masked by itself."""
        first = len(inputs) - self.num_state
        if is_masked:
            return tuple(inputs)
        return (
            *(x.clone() for x in inputs[:first]),
            *(sliced(inputs[first + i], own) for i, own in enumerate(plan.states)),
        )


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


def distance(found: Sequence[object], expected: Sequence[object]) -> float:
    """The largest difference over the largest number of each output; infinite where shapes differ."""
    if len(found) != len(expected):
        return float("inf")
    worst = 0.0
    for a, b in zip(found, expected, strict=True):
        if not isinstance(a, Tensor) or not isinstance(b, Tensor):
            worst = worst if a == b or b is None else float("inf")
        elif a.shape != b.shape:
            return float("inf")
        elif a.numel():
            whole = b.double()
            error = float((a.double() - whole).abs().max() / whole.abs().max().clamp(min=1e-6))
            worst = max(worst, error if error == error else float("inf"))
    return worst


def _told(error: Exception) -> str:
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
    kept: dict[str, tuple[tuple[int, ...] | None, ...]] = {}
    for name, dims in tied.named.items():
        own = tuple(_indexes(terms.kept(dim, removed), len(dim)) for dim in dims)
        if any(indexes is not None for indexes in own):
            kept[name] = own
    attributes = {path: dict(own) for path, own in attributes.items()}
    for path, name, dim in tied.sizes:
        if (num := len(terms.kept(dim, removed))) != len(dim):
            attributes.setdefault(path, {})[name] = num
    states = tuple(tuple(_indexes(terms.kept(dim, removed), len(dim)) for dim in dims) for dims in tied.states)
    return PruningPlan(
        model=type(model).__name__,
        shapes={name: tuple(tensors[name].shape) for name in kept},
        kept=kept,
        attributes=attributes,
        states=states,
    )


def _indexes(kept: list[int], size: int) -> tuple[int, ...] | None:
    return None if len(kept) == size else tuple(kept)


def counted_attributes(model: nn.Module, tied: Tied, removed: frozenset[int]) -> dict[str, dict[str, int]]:
    """Whole numbers of the user's own modules that equal a size that changes where their code runs: heads, widths.

    It is a guess, and the trial decides.
    """
    modules = dict(model.named_modules())
    sizes: dict[str, dict[int, set[int]]] = {}
    for node, value in tied.values.items():
        changed: dict[int, int] = {}
        for shape in shapes_in(value):
            changed |= {
                len(dim): len(tied.terms.kept(dim, removed)) for dim in shape.dims if _is_cut(tied, dim, removed)
            }
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


def _is_cut(tied: Tied, dim: Dim, removed: frozenset[int]) -> bool:
    return bool(removed) and not removed.isdisjoint(tied.terms.variables(dim))


def refuse_unequal(model: nn.Module, graph: Graph, inputs: Sequence[Tensor], tied: Tied) -> None:
    """The graph has to give what the model gives, or nothing found on it holds.

    Raises PlanError where it does not: the model draws random numbers, or depends on more than its inputs.
    """
    own, given = in_float64(model), to_float64(inputs)
    with torch.no_grad():
        found = flat_outputs(own(*(x.clone() for x in given)))
    if not distance(found, masked_outputs(tied, own, given, set())) <= TOLERANCE:
        raise PlanError(
            f"the exported graph of {type(model).__name__} does not give what the module gives; "
            "forward must depend on its inputs alone, without random numbers in eval mode"
        )
