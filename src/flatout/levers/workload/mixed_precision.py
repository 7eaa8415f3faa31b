"""The models run under autocast: their products in bfloat16, with sums in float32.

What        `torch.autocast` around each call of a root module, its outputs as float32 again, so that a loss outside the call is
            computed in float32 as well. Sums of products are kept from being reduced in bfloat16. No gradient scaler: bfloat16
            has the exponents of float32.
Guarantee   BOUNDED at bfloat16: no worse than the script as it is under autocast. Weights, their gradients and the optimizer
            stay in float32.
Refuses     Runs under autocast already; machines whose bfloat16 products were not measured to be faster; models with few
            float32 products.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Final

from flatout.cost.accounting import main_model, milliseconds, model_seconds
from flatout.cost.matrix_units import (
    image_convolutions,
    is_autocast,
    rate_over_float32,
    seconds_of_products,
    tried_saving,
    waits_for_host,
)
from flatout.errors import EditError, PlanError
from flatout.records.evidence import Evidence
from flatout.records.finding import Finding
from flatout.records.lever import Candidate, Lever, Parameters, Refusal, Seams

if TYPE_CHECKING:
    import libcst as cst
    from torch import nn

_FASTER: Final = 1.5
"""What bfloat16 products must gain for the casts around them to be worth it."""
_SMALL_PART: Final = 0.1
_CASTS: Final = 0.8
"""Small products on a CPU took up to 1.9 times as long with the casts around them (bench/results, tune_examples)."""
_EFFORT: Final = 3.0
"""The first trial also runs the script under autocast to see what bfloat16 rounds; and exact levers come before coarse ones."""


def propose(evidence: Evidence, findings: Sequence[Finding]) -> Iterator[Candidate | Refusal]:
    """Where float32 products are much of a step, and bfloat16 ones were measured to be faster."""
    products_s, rate = seconds_of_products(evidence), rate_over_float32(evidence, "bfloat16")
    why_not = _why_not(evidence, products_s, rate)
    if why_not:
        yield Refusal(lever=LEVER.id, because=why_not)
        return
    tried_s = tried_saving(evidence, "bf16-autocast")
    rate = rate or _FASTER
    most_s = model_seconds(evidence) * (1 - 1 / rate)
    least_s = -_CASTS * model_seconds(evidence) if evidence.workload.device == "cpu" else 0.1 * products_s
    saved_s = (0.7 * tried_s, 1.15 * tried_s) if tried_s is not None else (least_s, most_s)
    if evidence.workload.device != "cpu" and image_convolutions(evidence):
        saved_s = (
            saved_s[0],
            max(saved_s[1], most_s),
        )  # kernels transpose NCHW for matrix units: more with channels-last
    yield Candidate(
        lever=LEVER.id,
        parameters={"dtype": "bfloat16", **_place(evidence)},
        saved_s=saved_s,
        because=f"float32 products take {milliseconds(products_s)} of a step; in bfloat16 they were measured {rate:.1f} times as "
        "fast on this machine",
    )


def _why_not(evidence: Evidence, products_s: float, rate: float | None) -> str:
    if is_autocast(evidence):
        return "the script runs under autocast already"
    if products_s < _SMALL_PART * evidence.steps.whole_s:
        return "float32 products are a small part of a step"
    if waits_for_host(evidence):
        return "the device waits for its host most of a step"
    if rate is None:
        return "how fast bfloat16 products are on this machine was not measured"
    if rate < _FASTER:
        return f"bfloat16 products are {rate:.1f} times as fast as float32 ones on this machine: no units for them"
    return ""


def _place(evidence: Evidence) -> Parameters:
    """The statement that calls the model, for the edit; nothing where it cannot be named."""
    from flatout.levers.syntax.source import place_of

    model = main_model(evidence)
    where = evidence.source_of(evidence.models[model].source) if model is not None else None
    if where is None:
        return {}
    try:
        return place_of(evidence, where) | {"device": "cpu" if evidence.workload.device == "cpu" else "cuda"}
    except EditError:
        return {}


def apply(seams: Seams, parameters: Parameters) -> None:
    """Autocast around calls of root modules; float32 comes out."""
    import torch

    from flatout.profiling.calls import map_tensors

    if parameters.get("dtype", "bfloat16") != "bfloat16":
        raise PlanError(
            f"dtype {parameters['dtype']!r} is not 'bfloat16': float16 needs a gradient scaler in the training loop"
        )

    def context(module: nn.Module) -> AbstractContextManager[object]:
        seams.note(LEVER.id)
        return torch.autocast(_device(module), dtype=torch.bfloat16)

    def in_float32(module: nn.Module, output: Any) -> Any:
        return map_tensors(output, lambda t: t.float() if t.dtype is torch.bfloat16 else t)

    seams.at_start(_full_accumulation)
    seams.around_calls(context)
    seams.on_outputs(in_float32)


def _device(module: nn.Module) -> str:
    return next((p.device.type for p in module.parameters()), "cpu")


def _full_accumulation() -> Callable[[], None]:
    """Products of 16-bit numbers are summed in float32 to the end; returns how to allow less again."""
    import torch

    backend = torch.backends.cuda.matmul
    names = ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction")
    before = {name: getattr(backend, name) for name in names}
    for name in names:
        setattr(backend, name, False)

    def undo() -> None:
        for name, value in before.items():
            setattr(backend, name, value)

    return undo


def edit(text: str, parameters: Parameters) -> str:
    """`with torch.autocast(...)` around the statement that calls the model, and those after it that make the loss of it."""
    import libcst as cst

    from flatout.levers.syntax.imports import with_import
    from flatout.levers.syntax.source import find, statements, with_statements

    if "code" not in parameters:
        raise EditError("the statement that calls the model was not seen")
    place = find(text, parameters)
    if not isinstance(place.statement, cst.SimpleStatementLine):
        raise EditError(f"'{parameters['code']}' is no plain statement")
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
        inside: list[cst.BaseStatement] = [statement, *_made_of_it(rest, calls)]
        [head] = statements(
            f'with torch.autocast("{parameters.get("device", "cuda")}", dtype=torch.bfloat16):\n    pass\n'
        )
        assert isinstance(head, cst.With)
        bare = statement.with_changes(leading_lines=())
        changes |= {one: [] for one in inside}
        changes[statement] = [head.with_changes(body=cst.IndentedBlock(body=[bare, *inside[1:]]))]
    return with_import(with_statements(place.module, changes), "torch").code


def _model_calls(
    module: cst.Module, statement: cst.BaseStatement
) -> dict[cst.BaseStatement, Sequence[cst.BaseStatement]]:
    """Plain statements that call a model made in the file, in the outermost loop around this one, with the block from each on."""
    import libcst as cst
    from libcst import matchers as m

    from flatout.levers.syntax.models import names_of_models
    from flatout.levers.syntax.source import code_of
    from flatout.levers.syntax.surroundings import levels, parents_of

    names = names_of_models(module)
    parents = parents_of(module)
    loops = [level.owner for level in levels(parents, statement) if isinstance(level.owner, (cst.For, cst.While))]
    called = m.Call(func=m.Name() | m.Attribute())
    found: dict[cst.BaseStatement, Sequence[cst.BaseStatement]] = {}
    for one in m.findall(loops[-1], m.SimpleStatementLine()) if loops else ():
        assert isinstance(one, cst.SimpleStatementLine)
        here = {code_of(c.func) for c in m.findall(one, called)}  # type: ignore[attr-defined]
        if here & names:
            level = next(levels(parents, one))
            found[one] = level.block[level.at :]
    return found


def _made_of_it(block: Sequence[cst.BaseStatement], calls: Container[cst.CSTNode]) -> Iterator[cst.BaseStatement]:
    """What stands right behind a statement: other calls, and assignments that read what it, or one of them, has assigned."""
    import libcst as cst
    from libcst import matchers as m

    from flatout.levers.syntax.source import assigned_in, names_in

    known = assigned_in(block[0])
    for statement in block[1:]:
        is_assignment = isinstance(statement, cst.SimpleStatementLine) and m.matches(
            statement.body[0], m.Assign() | m.AugAssign() | m.AnnAssign()
        )
        is_one = statement in calls or bool(names_in(statement) & known)
        if not is_assignment or not is_one or m.findall(statement, _leaves()):
            return
        known |= assigned_in(statement)
        yield statement


def _leaves() -> Any:
    from libcst import matchers as m

    read = m.Name("item") | m.Name("backward") | m.Name("step") | m.Name("detach") | m.Name("tolist") | m.Name("numpy")
    return m.Call(func=m.Attribute(attr=read))


LEVER = Lever(
    id="workload.mixed-precision",
    title="Products in bfloat16",
    guarantee="bounded",
    module=__name__,
    propose=propose,
    apply=apply,
    conflicts=("workload.tf32",),
    edit=edit,
    effort=_EFFORT,
    dtype=lambda parameters: "bfloat16",
)
