"""Products of large Linear layers in float8 while they train, through torchao.

What        `flatout.blocks.training.float8.convert` on a model at its first call, on its device, before it is compiled; with
            `compile` the model is compiled as well, where the script has not: in eager code the casts are kernels of their
            own, and float8 loses. Weights, their gradients and the optimizer stay as they are, under the same names;
            evaluation runs in float8, too. With `gated`, gated MLPs (`down(silu(gate(x)) * up(x))`) of three such layers are
            run as one (`flatout.blocks.kernels.float8_gating`): SwiGLU and its gradients are rounded where they are computed.
Guarantee   QUALITY: the metric tells. Inputs of each product are rounded to 3 bits after the point (e4m3; with one scale a
            tensor the gradients of outputs to 2, e5m2), scaled anew each time; the forward's sums are those of the units'
            fast accumulation, which keeps fewer bits than float32.
Price       `bench/float8_device.py` on an H200, torch 2.11. A language model of width 1024 after 400 steps on Python's manual,
            two seeds: a held-out loss of 1.467 instead of 1.458 (the seeds differ by -0.001 and +0.017; two seeds of bfloat16
            differ by 0.03), with scales by row 1.459. A product is off by 3.8 % (gradients 5.9 %) where bfloat16 is off by 0.17
            %. It gains 1.32x (1.28 to 1.34) a step of four layers of 4096 with 8192 tokens, compiled; 1.07x with scales by row;
            and 0.50x without compiling. Layer by layer 1.57x at 8192 x 8192 and 1.41x at 4096 x 11008, but 0.93x at 4096 x 4096
            and 0.65x at 1024 x 1024: small layers lose, some that torchao's rule takes among them.
Refuses     GPUs below compute capability 8.9; no torchao; products in float16; layers too small to gain, by torchao's
            measurements; numbers of rows that are no multiple of 16. Of products in float32 it promises what they gain once
            `workload.mixed-precision` has them in bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple, cast

import libcst as cst

from flatout.core.errors import EditError, LeverRefused, PlanError
from flatout.core.parts import lever
from flatout.core.records.evidence import Evidence, Operator
from flatout.core.records.finding import Finding
from flatout.core.records.lever import Candidate, Hooks, Parameters
from flatout.machine.cost.accounting import milliseconds
from flatout.machine.cost.families import COMPILED_GRAPH
from flatout.tune.levers.float8_units import bfloat16_seconds, check_gains, compiles_graphs, float8_rate
from flatout.tune.rewrite.calls import compiles_models
from flatout.tune.rewrite.enclosing_blocks import assignment
from flatout.tune.rewrite.imports import call_name, with_import
from flatout.tune.rewrite.models import behind_model, constructions_in
from flatout.tune.rewrite.source import code_of, nodes_of, parsed, statements, with_changes

if TYPE_CHECKING:
    from torch import nn

    from flatout.blocks.training.float8 import Recipe

_RECIPES: Final = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
_SMALL_PART: Final = 0.2
"""Of a step: what is less gains less than 10 % even at twice the rate."""
_MAY_COST: Final = 0.3
"""Of the products' seconds: our guess at casts that are not fused."""
_EFFORT: Final = 5.0
"""Compiled code is made anew: as for graph.compile."""


class _Float8Products(NamedTuple):
    """What would run in float8: seconds of a step at most, what bfloat16 takes for it, and its sizes."""

    seconds: float
    bfloat16_s: float
    sizes: str


def propose(evidence: Evidence, findings: Sequence[Finding]) -> Iterator[Candidate]:
    """Propose it where large products in bfloat16 are much of a training step, and the device is faster in float8."""
    from flatout.blocks.training.float8 import absence

    check_gains(evidence)
    if reason := absence():
        raise LeverRefused(reason)
    products = _products(evidence)
    share = products.seconds / evidence.steps.whole_s if evidence.steps.whole_s else 0.0
    if share < _SMALL_PART:
        raise LeverRefused(f"products that float8 would make faster are {share:.0%} of a step at most")
    compiles, rate = compiles_graphs(evidence), float8_rate(evidence)
    yield Candidate(
        parameters={"recipe": "tensorwise", "gated": True, **({} if compiles else {"compile": True})},
        saved_s=(-_MAY_COST * products.bfloat16_s, (1 - 1 / rate) * products.bfloat16_s),
        because=f"{products.sizes} take up to {milliseconds(products.bfloat16_s)} of a step in bfloat16; in float8 the units are "
        f"{rate:.1f} times as fast" + ("" if compiles else ", once the casts are compiled into their neighbours"),
    )


def _products(evidence: Evidence) -> _Float8Products:
    """Products of Linear layers that gain: those that were observed one by one, else those in compiled graphs."""
    graphs = [o for o in evidence.operators if o.op == COMPILED_GRAPH]
    return _in_graphs(evidence, graphs) if graphs else _one_by_one(evidence)


def _one_by_one(evidence: Evidence) -> _Float8Products:
    from flatout.blocks.training.float8 import MULTIPLE, size_refusal

    rows = [o for o in evidence.operators if o.op in ("aten.mm", "aten.addmm") and _shape(o) is not None]
    gaining: set[tuple[int, ...]] = set()
    whys: dict[str, None] = {}
    for shape in (_shape(o) for o in rows if o.phase == "forward"):
        assert shape is not None
        r, k, n = shape
        why = f"{r} rows are no multiple of {MULTIPLE}" if r % MULTIPLE else size_refusal(k, n)
        if why is None:
            gaining.add(tuple(sorted(shape)))
        else:
            whys.setdefault(why)
    if not gaining:
        raise LeverRefused(f"no layer gains: {next(iter(whys))}" if whys else "no product of a Linear layer was seen")
    # The backward's two products are of the same three sizes in another order.
    rows = [o for o in rows if tuple(sorted(_shape(o) or ())) in gaining]
    bfloat16_s = sum(bfloat16_seconds(evidence, o) for o in rows)
    return _Float8Products(sum(o.op_s for o in rows), bfloat16_s, f"products of {len(gaining)} sizes that gain")


def _shape(operator: Operator) -> tuple[int, int, int] | None:
    """Rows, inputs and outputs of a product in bfloat16 or float32; None for another."""
    a, b = operator.inputs[-2:] if len(operator.inputs) >= 2 else (None, None)
    if a is None or b is None or len(a.shape) != 2 or len(b.shape) != 2 or a.dtype not in ("bfloat16", "float32"):
        return None
    return a.shape[0], a.shape[1], b.shape[1]


def _in_graphs(evidence: Evidence, graphs: Sequence[Operator]) -> _Float8Products:
    """The time of all products of compiled graphs at the measured rate; weights are inputs of their graphs."""
    from flatout.blocks.training.float8 import size_refusal

    matrices = {t.shape for o in graphs for t in o.inputs if len(t.shape) == 2}
    if not any(size_refusal(k, n) is None for n, k in matrices):
        raise LeverRefused("no weight in the compiled graphs is large enough to gain")
    rates = evidence.machine.matmul_flop_per_s if evidence.machine is not None else {}
    if not rates.get("bfloat16"):
        raise LeverRefused("how fast bfloat16 products are on this machine was not measured")
    flop = sum(o.flop * o.num_calls for o in graphs)
    seconds = min(flop / rates["bfloat16"], sum(o.op_s for o in graphs))
    return _Float8Products(seconds, seconds, "products in compiled graphs")


def apply(hooks: Hooks, parameters: Parameters) -> None:
    """Convert each root module with layers that gain, at its first call in training.

    Raises PlanError for an unknown recipe. At that call: UsageError on a device without float8, and without torchao.
    """
    recipe = _recipe(parameters)

    def change(module: nn.Module) -> Callable[[], None] | None:
        import torch

        from flatout.blocks.kernels.float8_gating.layers import run_gated_as_one
        from flatout.blocks.training import float8
        from flatout.check.observe.calls import wrapped

        inner = wrapped(module)
        gaining = [p for p, m in inner.named_modules() if p and float8.layer_refusal(m, recipe=recipe) is None]
        if not gaining or not (module.training or torch.is_grad_enabled()):
            return None  # nothing would gain, or it is a teacher
        compiled = bool(parameters.get("compile")) and not _is_compiled(module)
        converted = float8.convert(inner, recipe=recipe)
        gated = run_gated_as_one(inner) if parameters.get("gated") else None
        hooks.note(LEVER.id)
        if compiled:
            inner.compile()

        def undo() -> None:
            if compiled:
                inner._compiled_call_impl = None
            if gated is not None:
                gated.undo()
            float8.revert(inner, converted)

        return undo

    hooks.at_first_call(change)


def _recipe(parameters: Parameters) -> Recipe:
    recipe = parameters.get("recipe", "tensorwise")
    if recipe not in _RECIPES:
        raise PlanError(f"recipe {recipe!r} is none of {', '.join(_RECIPES)}")
    return cast("Recipe", recipe)


def _is_compiled(module: nn.Module) -> bool:
    """Whether the script, or another lever, has it compiled, whole or in parts."""
    return any(m._compiled_call_impl is not None or type(m).__name__ == "OptimizedModule" for m in module.modules())


def edit(text: str, parameters: Parameters) -> str:
    """Write `float8.convert(model)` behind the statement that constructs or moves the model, and before it is compiled."""
    if "float8" in text:
        raise EditError("the file speaks of float8 itself")
    recipe = _recipe(parameters)
    arguments = "" if recipe == "tensorwise" else f', recipe="{recipe}"'

    def converting(name: str) -> str:
        gated = f"run_gated_as_one({name})\n" if parameters.get("gated") else ""
        return f"float8.convert({name}{arguments})\n{gated}"

    module = parsed(text)
    found = _compiling(module)
    if found is None:
        last = "" if compiles_models(module) or not parameters.get("compile") else "model.compile()\n"
        module = parsed(behind_model(text, converting("model") + last))
    else:
        name, statement = found
        first, *more = statements(converting(name))
        changed: list[cst.BaseStatement] = [
            first.with_changes(leading_lines=statement.leading_lines),
            *more,
            statement.with_changes(leading_lines=()),
        ]
        module = with_changes(module, {statement: changed})
    if parameters.get("gated"):
        module = with_import(module, "flatout.blocks.kernels.float8_gating.layers", "run_gated_as_one")
    return with_import(module, "flatout.blocks.training", "float8").code


def _compiling(module: cst.Module) -> tuple[str, cst.SimpleStatementLine] | None:
    """What `x = torch.compile(x)` names, and that statement; functions are passed over.

    Raises EditError where there are several.
    """
    found, objects = [], constructions_in(module)
    for line in nodes_of(cst.SimpleStatementLine, module):
        _, call = assignment(line) or (None, None)
        if not isinstance(call, cst.Call):
            continue
        name = code_of(call.args[0].value) if call.args else ""
        is_object = any(one.name == name and one.statement is not line for one in objects)
        if is_object and call_name(module, call.func) == "torch.compile":
            found.append((name, line))
    if len(found) > 1:
        raise EditError("several things are compiled; which one is the model?")
    return found[0] if found else None


LEVER = lever(__name__, propose, apply=apply, edit=edit, effort=_EFFORT, title="Large products in float8")
