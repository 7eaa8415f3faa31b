"""Forward and backward run operator by operator, where compiled code would be faster.

Costs        Every operator is dispatched on its own, forward and backward, and writes its result to memory, from where the next
             one reads it.
Evidence     Time of the root module beside its products and convolutions, in a script that compiles nothing. Trial: the module
             under torch.compile in its default mode, in the time that other trials leave; or, where most of it are blocks that
             are alike, with these compiled each alone, which compiles one for all.
Levers       graph.compile
False alarm  Short runs: compiling takes what the finding says, at every start. A pass over data without training that ended,
             with the script, before compiling would have paid is left out. Inputs whose shapes change from step to step
             compile anew. So this cure of the whole module comes after causes at a line, and what gains less than 1.15x of
             the step is a remark beside the findings.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil
from typing import Final

from flatout.core import units
from flatout.core.parts import rule
from flatout.core.records.evidence import Evidence
from flatout.core.records.finding import Finding, Note
from flatout.core.records.trial import TimeCompiled
from flatout.machine.cost.accounting import is_steady, milliseconds, remaining_fraction
from flatout.machine.cost.compiling import block_containers, has_changing_shapes
from flatout.machine.cost.matrix_units import autocast_dtype, rate_over_float32
from flatout.machine.cost.module_cures import (
    PricedCure,
    compiled_result,
    is_in_library,
    main_call,
    name_of_module,
    operators_of,
    seconds_beside_products,
    times_of_both,
)

_WORTH_A_TRIAL: Final = 0.2
"""Of the step: a compiler gets rid of a half or two thirds of what it fuses, so less would not come to 1.15x."""
_LEAST_RATE: Final = 1.2
_FEWEST_STEPS: Final = 12


def propose(evidence: Evidence) -> Iterator[TimeCompiled]:
    """Time the module compiled, once: what it takes depends on the time that is left."""
    main = main_call(evidence)
    if main is None or not is_steady(evidence) or _has_compiled(evidence) or evidence.workload.world_size > 1:
        return
    index, model = main
    if any(isinstance(r.trial, TimeCompiled) and r.trial.model == index for r in evidence.trials):
        return
    if evidence.steps.num_observed >= _FEWEST_STEPS and seconds_beside_products(evidence, model) > _WORTH_A_TRIAL * (
        evidence.steps.step_s
    ):
        rate = rate_over_float32(evidence, "bfloat16")
        is_half_worth = not autocast_dtype(evidence) and (rate is None or rate >= _LEAST_RATE)
        yield TimeCompiled(
            model=index,
            backward=model.num_graphs_used > 0,
            num_operators=round(sum(o.num_calls for o in operators_of(evidence, model)) / max(1.0, model.calls)),
            autocast="bfloat16" if is_half_worth else "",
            regions=block_containers(evidence),
            dynamic=has_changing_shapes(evidence),
        )


def check(evidence: Evidence) -> Iterator[Finding]:
    """Yield one finding for the module."""
    cure = _priced(evidence)
    if cure is None or not cure.is_worth_a_change:
        return
    busy_s = seconds_beside_products(evidence, cure.model)
    yield Finding(
        where=cure.where,
        cost_s=cure.saved_s[1],
        saved_s=cure.saved_s,
        because=f"{milliseconds(busy_s)} of the step are forward and backward beside products, operator by operator; "
        f"{_how(cure)}, {cure.passes} {'take' if cure.has_backward else 'takes'} {remaining_fraction(cure.result):.0%} (tried)"
        f"{times_of_both(cure.result)}{_price(cure)}",
        edit=_edit(evidence, cure),
        module=cure.model.name,
        basis="trial",
    )


def note(evidence: Evidence) -> Iterator[Note]:
    """Yield a remark where it gains, but less than compiling at every start is worth."""
    cure = _priced(evidence)
    if cure is not None and cure.is_worth_a_remark:
        yield Note(
            where=cure.where, text=f"{_how(cure)} the step would be {cure.gain:.2f}x as fast (tried){_price(cure)}"
        )


def _priced(evidence: Evidence) -> PricedCure | None:
    main, result = main_call(evidence), compiled_result(evidence)
    if main is None or result is None or _has_compiled(evidence):
        return None
    cure = PricedCure.of(evidence, main, result)
    return None if _is_over_too_soon(evidence, cure) else cure


def _is_over_too_soon(evidence: Evidence, cure: PricedCure) -> bool:
    """Whether all steps of a loop of known length save less than compiling takes.

    A pass over data without training is as long as its data. A training run may have been cut short to look at it.
    """
    steps = evidence.steps
    is_pass = steps.kind == "inference" and bool(evidence.loaders) and not any(u.num_epochs for u in evidence.loaders)
    saved_s = sum(cure.saved_s) / 2 * steps.num_observed
    return is_pass and evidence.exit == "finished" and cure.result.parts.get("compile", 0.0) > saved_s


def _has_compiled(evidence: Evidence) -> bool:
    return evidence.compilation is not None and bool(
        evidence.compilation.num_graphs or evidence.compilation.compiled_at
    )


def _how(cure: PricedCure) -> str:
    return "with its blocks compiled" if cure.result.variant == "regions" else "compiled"


def _price(cure: PricedCure) -> str:
    """What compiling took, and after how many steps it has paid for itself."""
    compile_s, saved_s = cure.result.parts.get("compile", 0.0), sum(cure.saved_s) / 2
    steps = f", which pays after {ceil(compile_s / saved_s)} steps" if saved_s > 0 else ""
    return f"; compiling took {units.duration(compile_s)} here{steps}"


def _edit(evidence: Evidence, cure: PricedCure) -> str:
    trial = cure.result.trial
    assert isinstance(trial, TimeCompiled)
    options = "dynamic=True" if trial.dynamic else ""
    if is_in_library(cure.where):
        return (
            "have what runs this loop do it: TrainingArguments(torch_compile=True) in transformers; elsewhere "
            f"model.compile({options}) before the model is handed over"
        )
    name = name_of_module(cure.where)
    if cure.result.variant == "regions":
        paths = [f"{name}.{path}" if path else name for path in trial.regions]
        blocks = paths[0] if len(paths) == 1 else f"[*{', *'.join(paths)}]"
        return (
            f"for block in {blocks}: block.compile({options}) once, before the loop; or {name} = torch.compile({name})"
        )
    return f"{name} = torch.compile({', '.join(filter(None, (name, options)))}) once, before the loop"


RULE = rule(__name__, check, propose=propose, note=note, is_cure=True, title="Forward and backward are not compiled")
