"""Equal layers on different inputs are called one by one where one batched product would do.

Costs        For each layer its dispatch, its Python, and a product too small for the machine; in the backward and the optimizer
             the same again.
Evidence     Products of one line and one shape in many modules of one list, none of which needs the result of another. Trial:
             such layers one by one, and as one batched product with their weights stacked, forward and backward.
Levers       graph.merge-products, parallelism.batch-modules
False alarm  Layers large enough to fill the machine alone: the trial says so. Layers in a chain depend on one another.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from flatout.core.parts import rule
from flatout.core.records.evidence import Evidence
from flatout.core.records.finding import Finding
from flatout.core.records.trial import TimeStackedLinears
from flatout.machine.cost.accounting import around, group_by, has_backward, milliseconds
from flatout.machine.cost.suspects import proposing, tried
from flatout.machine.cost.trace import consumers, longest_dependence

_INPUT_AT = {"aten.addmm": 1, "aten.mm": 0}
_PARTS = frozenset(f"aten.{n}" for n in ("slice", "split", "split_with_sizes", "select", "unbind", "chunk", "narrow"))
_FEWEST = 4
_WORTH_A_TRIAL = 0.05
_SMALL_TENSOR = 4096
"""Below so many elements a tensor costs the optimizer its dispatch and not its bytes."""


class _EqualLayers(NamedTuple):
    """Calls of equal layers that lie in one container."""

    rows: tuple[int, ...]
    """All operators of that container, forward and backward."""
    trial: TimeStackedLinears
    container: str
    first_source: int
    """The line of the first of the calls."""


def check(evidence: Evidence) -> Iterator[Finding]:
    """Yield one finding per container."""
    for layers in tried(evidence, _sets):
        trial, saved_s = layers.suspect.trial, layers.saved_s
        if saved_s > 0:
            num = _num_parameters(evidence, layers.suspect)
            saved_s += _accumulation_s(evidence, num) + _optimizer_s(evidence, num)
        yield Finding(
            where=evidence.source_of(_caller(evidence, layers.suspect)),
            cost_s=max(layers.cost_s, saved_s),
            saved_s=around(saved_s, 0.12),
            because=f"{trial.num} layers of {trial.in_features} to {trial.out_features} in {layers.suspect.container} run one by "
            f"one though none needs the result of another, {milliseconds(layers.cost_s)} a step with all around them; as one "
            f"batched product they take {layers.remaining:.0%} (tried)",
            edit=f"stack their weights into one parameter of shape ({trial.num}, in, out) and use torch.baddbmm(bias, x, weight) "
            "in place of the loop (torch.func.stack_module_state and vmap do it for any module)",
            module=layers.suspect.container,
            operators=layers.suspect.rows,
            basis="trial",
        )


def _sets(evidence: Evidence) -> Iterator[_EqualLayers]:
    """The largest set of equal, independent layers of each container."""
    trace, operators = evidence.trace, evidence.operators
    products = []
    for call, row in enumerate(trace.operator):
        operator = operators[row]
        if operator.op not in _INPUT_AT or operator.phase == "backward" or "." not in operator.module:
            continue
        if operator.source >= 0 and trace.producers[call][-1] < 0:  # the weights come from outside the step
            products.append(call)

    def key(call: int) -> tuple[str, int, tuple[tuple[int, ...], ...]]:
        operator = operators[trace.operator[call]]
        return operator.op, operator.source, tuple(t.shape for t in operator.inputs)

    found: dict[str, list[int]] = {}
    for calls in group_by(products, key).values():
        modules = {operators[trace.operator[c]].module for c in calls}
        container = _container(modules)
        if len(modules) < _FEWEST or not container or len(calls) <= len(found.get(container, ())):
            continue
        if longest_dependence(trace, operators, {trace.operator[c] for c in calls}) <= 1 and not _share_input(
            evidence, calls
        ):
            found[container] = calls
    for container, calls in found.items():
        if _feed_one_another(evidence, container):
            continue
        rows = tuple(i for i, o in enumerate(operators) if o.module.startswith(f"{container}."))
        first = operators[trace.operator[calls[0]]]
        tensor = first.inputs[_INPUT_AT[first.op]]
        trial = TimeStackedLinears(
            num=len(calls),
            rows=tensor.shape[0],
            in_features=tensor.shape[1],
            out_features=first.outputs[0].shape[-1],
            dtype=tensor.dtype,
            bias=first.op == "aten.addmm",
            backward=has_backward(evidence, rows),
        )
        yield _EqualLayers(rows, trial, container, first.source)


def _feed_one_another(evidence: Evidence, container: str) -> bool:
    """Whether a module of the container needs what another one of them made: products of their weights alone do not show it."""
    trace, operators = evidence.trace, evidence.operators
    reached: dict[int, frozenset[str]] = {}
    """For each call: the modules of the container that it depends on."""
    for call, row in enumerate(trace.operator):
        operator = operators[row]
        if operator.phase == "backward":
            continue
        before = frozenset().union(*(reached.get(p, frozenset()) for p in trace.producers[call]))
        inside = operator.module.startswith(f"{container}.")
        own = operator.module.removeprefix(f"{container}.").partition(".")[0] if inside else ""
        if inside and before - {own}:
            return True
        if found := before | {own} if inside else before:
            reached[call] = found
    return False


def _container(modules: set[str]) -> str:
    """The path above the one part in which these paths differ; '' when they differ in more."""
    paths = [m.split(".") for m in modules]
    if len({len(p) for p in paths}) > 1:
        return ""
    differing = [i for i, parts in enumerate(zip(*paths, strict=True)) if len(set(parts)) > 1]
    return ".".join(paths[0][: differing[0]]) if len(differing) == 1 else ""


def _share_input(evidence: Evidence, calls: list[int]) -> bool:
    """Whether all read one whole tensor: then they are one wider layer, which another rule tells."""
    trace, operators = evidence.trace, evidence.operators
    place = _INPUT_AT[operators[trace.operator[calls[0]]].op]
    producers = {trace.producers[c][place] for c in calls}
    if len(producers) > 1 or not operators[trace.operator[calls[0]]].inputs[place].is_contiguous:
        return False
    readers = consumers(trace).get(next(iter(producers)), [])
    return not any(operators[trace.operator[r]].op in _PARTS for r in readers)


def _caller(evidence: Evidence, layers: _EqualLayers) -> int:
    """The line that calls the container's modules: the innermost one above theirs."""
    above = evidence.callers.get(layers.first_source, ())
    inside = {evidence.operators[i].source for i in layers.rows if evidence.operators[i].phase != "backward"}
    return next((s for s in above if s not in inside), layers.first_source)


def _num_parameters(evidence: Evidence, layers: _EqualLayers) -> int:
    """Weights and biases of all linear layers of the container."""
    products = [o for o in (evidence.operators[i] for i in layers.rows) if o.op in _INPUT_AT and o.phase != "backward"]
    biased = {o.module for o in products if o.op == "aten.addmm"}
    return len({o.module for o in products}) + len(biased)


def _accumulation_s(evidence: Evidence, num: int) -> float:
    """What handing over the gradients of so many parameters takes; autograd does that outside any module."""
    rows = [o for o in evidence.operators if o.op == "aten.detach" and o.phase == "backward" and not o.module]
    all_calls = sum(o.num_calls for o in rows)
    return sum(o.total_s for o in rows) * min(1.0, num / all_calls) if all_calls else 0.0


def _optimizer_s(evidence: Evidence, num: int) -> float:
    """What an update of so many small tensors costs above that of a few large ones."""
    use = max(evidence.optimizers, key=lambda u: u.num_tensors, default=None)
    if use is None or use.num_tensors < num or use.num_elements > _SMALL_TENSOR * use.num_tensors:
        return 0.0
    return min(use.step_s, evidence.steps.phases.get("optimizer", use.step_s)) * num / use.num_tensors


RULE = rule(
    __name__,
    check,
    propose=proposing(_sets, worth=_WORTH_A_TRIAL),
    title="Equal layers called one by one",
    rewrites_line=True,
)
