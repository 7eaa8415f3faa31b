"""The models run under autocast: their products in bfloat16, with sums in float32.

What        `torch.autocast` around each call of a root module, its outputs as float32 again, so that a loss outside the call is
            computed in float32 as well. Sums of products are kept from being reduced in bfloat16. No gradient scaler: bfloat16
            has the exponents of float32. With `frozen`, weights of linear layers that are not trained are held in bfloat16, as
            autocast rounds them in each call (`flatout.hold_frozen_weights`).
Guarantee   BOUNDED at bfloat16: no worse than the script as it is under autocast. Weights that are trained, their gradients and
            the optimizer stay in float32.
Refuses     Runs under autocast already; machines whose bfloat16 products were not measured to be faster; models with few
            float32 products.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Final

import libcst as cst
from libcst import matchers as m

from flatout.core.errors import EditError, LeverRefused, PlanError
from flatout.core.parts import lever
from flatout.core.records.evidence import Evidence
from flatout.core.records.finding import Finding
from flatout.core.records.lever import Candidate, Hooks, Parameters
from flatout.machine.cost.accounting import main_model, model_seconds
from flatout.machine.cost.matrix_units import image_convolutions, is_autocast, tried_saving
from flatout.tune.levers.proposals import RoundedProducts, rounded_products
from flatout.tune.rewrite.calls import calls_ending
from flatout.tune.rewrite.enclosing_blocks import enclosing_loops, levels, parents_of
from flatout.tune.rewrite.imports import with_import
from flatout.tune.rewrite.models import before_optimizers, names_of_models
from flatout.tune.rewrite.source import (
    assigned_in,
    code_of,
    find,
    names_in,
    nodes_of,
    place_parameters,
    statements,
    with_changes,
)

if TYPE_CHECKING:
    from torch import nn

_FASTER: Final = 1.5
"""What bfloat16 products must gain for the casts around them to be worth it."""
_CASTS: Final = 0.8
"""Small products on a CPU took up to 1.9 times as long with the casts around them (bench/results, tune_examples)."""
_UNTRIED: Final = 0.2
"""The part of the seconds promised by rates of products that is counted on where nothing was tried, as for TF32."""
_OF_TF32: Final = 0.7
"""The part of what TF32 saved when it was tried that is counted on at least."""
_EFFORT: Final = 3.0
"""The first trial also runs the script under autocast to see what bfloat16 rounds; and exact levers come before coarse ones."""

_SAVED_BYTES: Final = 2
_BLOCK: Final = "hold_frozen_weights"
_READS: Final = ("item", "backward", "step", "detach", "tolist", "numpy")
"""Methods that end what is under autocast."""


def propose(evidence: Evidence, findings: Sequence[Finding]) -> Iterator[Candidate]:
    """Propose it where float32 products are much of a step, and bfloat16 ones were measured to be faster."""
    if is_autocast(evidence):
        raise LeverRefused("the script runs under autocast already")
    products = rounded_products(evidence, "bfloat16", trial="bf16-autocast", least_rate=_FASTER)
    is_cpu, busy_s = evidence.workload.device == "cpu", model_seconds(evidence)
    most_s = busy_s * (1 - 1 / products.rate)
    least_s = -_CASTS * busy_s if is_cpu else min(most_s, _least_on_device(evidence, products))
    low, high = products.tried_s or (least_s, most_s)
    if not is_cpu and (image_convolutions(evidence) or not evidence.steps.is_device_bound):
        # kernels transpose NCHW for matrix units, and launches hide what faster kernels gain: others may change both
        high = max(high, min(most_s, 1.1 * products.seconds * (1 - 1 / products.rate)))
    frozen = _num_frozen(evidence)
    yield Candidate(
        parameters={"dtype": "bfloat16", **({"frozen": True} if frozen else {}), **_place(evidence)},
        saved_s=(low, high),
        saved_bytes=_SAVED_BYTES * frozen,
        because=products.because,
    )


def _num_frozen(evidence: Evidence) -> int:
    """How many numbers of the model are not trained, where that is most of it; else 0."""
    model = main_model(evidence)
    if model is None or not evidence.optimizers:
        return 0
    whole = evidence.models[model].num_parameters
    trained = sum(o.num_elements for o in evidence.optimizers) + sum(u.num_elements for u in evidence.unused_gradients)
    return whole - trained if whole - trained > whole / 2 else 0


def _least_on_device(evidence: Evidence, products: RoundedProducts) -> float:
    """Seconds that it saves where it was not tried: as many as TF32, where that was, since its products are no slower."""
    tf32_s = tried_saving(evidence, "tf32")
    return max(_UNTRIED * products.seconds * (1 - 1 / products.rate), _OF_TF32 * tf32_s if tf32_s is not None else 0.0)


def _place(evidence: Evidence) -> Parameters:
    """The statement that calls the model, for the edit; nothing where it cannot be named."""
    model = main_model(evidence)
    where = evidence.source_of(evidence.models[model].source) if model is not None else None
    if where is None:
        return {}
    try:
        return place_parameters(evidence, where) | {"device": "cpu" if evidence.workload.device == "cpu" else "cuda"}
    except EditError:
        return {}


def apply(hooks: Hooks, parameters: Parameters) -> None:
    """Autocast around calls of root modules; their outputs are float32."""
    import torch

    from flatout.core.tensors.nests import map_tensors

    if parameters.get("dtype", "bfloat16") != "bfloat16":
        raise PlanError(
            f"dtype {parameters['dtype']!r} is not 'bfloat16': float16 needs a gradient scaler in the training loop"
        )

    def context(module: nn.Module) -> AbstractContextManager[object]:
        hooks.note(LEVER.id)
        return torch.autocast(_device(module), dtype=torch.bfloat16)

    def in_float32(module: nn.Module, output: Any) -> Any:
        return map_tensors(output, lambda t: t.float() if t.dtype is torch.bfloat16 else t)

    if parameters.get("frozen"):
        from flatout.blocks.training.frozen_weights import hold_frozen_weights

        hooks.at_first_call(hold_frozen_weights)
    hooks.at_start(_full_accumulation)
    hooks.around_calls(context)
    hooks.on_outputs(in_float32)


def _device(module: nn.Module) -> str:
    return next((p.device.type for p in module.parameters()), "cpu")


def _full_accumulation() -> Callable[[], None]:
    """Products of 16-bit numbers are summed in float32 to the end; returns how to allow less again."""
    import torch

    from flatout.core.runtime.patches import set_attributes

    names = ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction")
    return set_attributes(torch.backends.cuda.matmul, **dict.fromkeys(names, False))


def edit(text: str, parameters: Parameters) -> str:
    """Write `with torch.autocast(...)` around the statement that calls the model, and those after it that compute its
    loss.
    """
    if "code" not in parameters:
        raise EditError("the statement that calls the model was not found")
    place = find(text, parameters)
    if not isinstance(place.statement, cst.SimpleStatementLine):
        raise EditError(f"'{parameters['code']}' is no plain statement")
    if m.matches(place.statement.body[0], m.Expr()):
        raise EditError(
            f"'{parameters['code']}' assigns nothing: autocast around it would cover more than the model's call"
        )
    if "autocast" in text:
        raise EditError("the file speaks of autocast already")
    calls = _model_calls(place.module, place.statement)
    if place.statement not in calls:
        block = [s for s in place.block[place.index :] if isinstance(s, cst.BaseStatement)]
        calls = {place.statement: block, **calls}
    changes: dict[cst.CSTNode, list[cst.BaseStatement]] = {}
    for statement, rest in calls.items():
        if statement in changes:
            continue  # it stands right behind another
        inside: list[cst.BaseStatement] = [statement, *_derived_statements(rest, calls)]
        [head] = statements(
            f'with torch.autocast("{parameters.get("device", "cuda")}", dtype=torch.bfloat16):\n    pass\n'
        )
        assert isinstance(head, cst.With)
        bare = statement.with_changes(leading_lines=())
        changes |= {one: [] for one in inside}
        changes[statement] = [head.with_changes(body=cst.IndentedBlock(body=[bare, *inside[1:]]))]
    module = with_import(with_changes(place.module, changes), "torch")
    if parameters.get("frozen"):
        module = with_import(before_optimizers(module, f"{_BLOCK}(model)\n"), "flatout", _BLOCK)
    return module.code


def _model_calls(
    module: cst.Module, statement: cst.BaseStatement
) -> dict[cst.BaseStatement, Sequence[cst.BaseStatement]]:
    """Plain statements that call a model made in the file, in the outermost loop around this one, with the block from each on."""
    names = names_of_models(module)
    parents = parents_of(module)
    loops = enclosing_loops(parents, statement)
    found: dict[cst.BaseStatement, Sequence[cst.BaseStatement]] = {}
    for one in nodes_of(cst.SimpleStatementLine, loops[-1]) if loops else ():
        if names & {code_of(call.func) for call in nodes_of(cst.Call, one)}:
            level = next(levels(parents, one))
            found[one] = level.block[level.at :]
    return found


def _derived_statements(
    block: Sequence[cst.BaseStatement], calls: Container[cst.CSTNode]
) -> Iterator[cst.BaseStatement]:
    """What stands right behind a statement: other calls, and assignments that read what it, or one of them, has assigned."""
    known = assigned_in(block[0])
    for statement in block[1:]:
        is_assignment = isinstance(statement, cst.SimpleStatementLine) and m.matches(
            statement.body[0], m.Assign() | m.AugAssign() | m.AnnAssign()
        )
        is_one = statement in calls or bool(names_in(statement) & known)
        if not is_assignment or not is_one or any(calls_ending(statement, name) for name in _READS):
            return
        known |= assigned_in(statement)
        yield statement


LEVER = lever(
    __name__,
    propose,
    apply=apply,
    conflicts=("workload.tf32",),
    edit=edit,
    effort=_EFFORT,
    dtype=lambda parameters: "bfloat16",
    title="Products in bfloat16",
    errors=("BFloat16", "must have the same dtype"),
)
