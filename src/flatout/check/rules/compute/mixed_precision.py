"""Products in float32 or TF32 on a device whose units for 16-bit types are faster.

Costs        A product in bfloat16 takes half of TF32's time on matrix units, a sixteenth of full float32's, and half of float32's
             on a CPU with AVX512-BF16; activations take half the traffic.
Evidence     Time in float32 products of forward and backward while no autocast of this device is in force: none, one with
             enabled=False, or one for another device. Trial: the root module with its forward under autocast, entered anew for
             each call, and in inference with weights in bfloat16; float16 where bfloat16 products were measured to be no faster.
Levers       workload.mixed-precision
False alarm  Work that needs float32's 24 bits (solvers, physics); where the loss contains derivatives, it is a remark alone. The
             gain is measured and the loss is not: compare losses before keeping it. So this cure of the whole module comes after
             causes at a line, and what gains less than 1.15x of the step is a remark beside the findings: no reason to change a
             model's numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import msgspec

from flatout.core.parts import rule
from flatout.core.records.evidence import Evidence, Operator
from flatout.core.records.finding import Finding, Note
from flatout.core.records.trial import TimeModel
from flatout.core.records.workload import short_place
from flatout.machine.cost.accounting import facts_named, milliseconds, model_trial, remaining_fraction, result_of
from flatout.machine.cost.matrix_units import (
    autocast_dtype,
    float32_products,
    rate_over_float32,
    runs_in_tf32,
    seconds_of_products,
    waits_for_host,
)
from flatout.machine.cost.module_cures import (
    PricedCure,
    compiled_result,
    is_in_library,
    main_call,
    times_of_both,
)

_WORTH_A_TRIAL: Final = 0.1
_COMPARISONS: Final = frozenset(
    f"aten.{name}" for name in ("gt", "lt", "ge", "le", "sort", "topk", "argsort", "argmin", "min")
)
_PRODUCTS: Final = frozenset(f"aten.{name}" for name in ("mm", "bmm", "addmm", "baddbmm", "matmul", "_cdist_forward"))
_NONLINEAR: Final = frozenset(
    f"aten.{name}" for name in ("relu", "gelu", "tanh", "sigmoid", "_softmax", "_log_softmax", "exp")
)
_MANY: Final = 4096
_NEAR: Final = 4
"""Operators between a product and what compares its numbers: a square, a sum, a view."""
_LEAST_RATE: Final = 1.2
"""Times the rate of float32: with less, the casts around the products eat what they gain."""


def propose(evidence: Evidence) -> Iterator[TimeModel]:
    """Time the module under autocast."""
    is_much = seconds_of_products(evidence) > _WORTH_A_TRIAL * evidence.steps.step_s
    if is_much and not waits_for_host(evidence):
        yield from _trials(evidence)


def check(evidence: Evidence) -> Iterator[Finding]:
    """Yield one finding for the module."""
    cure = _priced(evidence)
    if cure is None or not cure.is_worth_a_change or _has_derivatives_in_loss(evidence):
        return
    yield Finding(
        where=cure.where,
        cost_s=cure.saved_s[1],
        saved_s=cure.saved_s,
        because=f"products and convolutions in {_kind(evidence)} take {milliseconds(seconds_of_products(evidence))} of the step"
        f"{_idle_autocast(evidence)}; {_how(evidence, cure)} {cure.passes} "
        f"{'take' if cure.has_backward else 'takes'} {remaining_fraction(cure.result):.0%} (tried)"
        f"{times_of_both(compiled_result(evidence))}",
        edit=_edit(evidence, cure),
        module=cure.model.name,
        basis="trial",
    )


def note(evidence: Evidence) -> Iterator[Note]:
    """Yield a remark where it gains, but less than a change of the model's numbers is worth."""
    cure = _priced(evidence)
    if cure is None:
        return
    text = f"{_how(evidence, cure)} the step would be {cure.gain:.2f}x as fast (tried)"
    if cure.is_worth_a_change and _has_derivatives_in_loss(evidence):
        doubt = "; the loss contains derivatives of the network, which 8 bits of a number may not be enough for"
        yield Note(where=cure.where, text=text + doubt)
    elif cure.is_worth_a_remark:
        yield Note(where=cure.where, text=text)


def _has_derivatives_in_loss(evidence: Evidence) -> bool:
    """Whether gradients are differentiated again: physics in the loss, a penalty on gradients."""
    return bool(facts_named(evidence, "gradient-of-gradient"))


def _priced(evidence: Evidence) -> PricedCure | None:
    main = main_call(evidence)
    found = (result_of(evidence, trial) for trial in _trials(evidence))
    results = sorted((r for r in found if r is not None), key=remaining_fraction)
    return PricedCure.of(evidence, main, results[0]) if main is not None and results else None


def _trials(evidence: Evidence) -> Iterator[TimeModel]:
    """The module under autocast; where no gradients are taken, with its weights in bfloat16: no casts in each call."""
    half = _half(evidence)
    if half is None or autocast_dtype(evidence):
        return
    trial = model_trial(evidence, "bf16-autocast" if half == "bfloat16" else "fp16-autocast")
    if trial is not None:
        yield trial
    if trial is not None and not trial.backward and half == "bfloat16":
        yield msgspec.structs.replace(trial, variant="bf16-weights")


def _half(evidence: Evidence) -> str | None:
    """The 16-bit type whose products are faster here; None where none was measured to be faster than float32."""
    rate = rate_over_float32(evidence, "bfloat16")
    if rate is None or rate >= _LEAST_RATE:  # where it was not measured, the trial will tell
        return "bfloat16"
    is_device = evidence.workload.device != "cpu"
    return "float16" if is_device and (rate_over_float32(evidence, "float16") or 0.0) >= _LEAST_RATE else None


def _kind(evidence: Evidence) -> str:
    """What the float32 products run in."""
    if evidence.workload.device == "cpu":
        return "float32"
    kinds = {"TF32" if runs_in_tf32(evidence, evidence.operators[i]) else "float32" for i in float32_products(evidence)}
    return " and ".join(sorted(kinds))


def _has_weights_in_half(cure: PricedCure) -> bool:
    return isinstance(cure.result.trial, TimeModel) and cure.result.trial.variant == "bf16-weights"


def _how(evidence: Evidence, cure: PricedCure) -> str:
    return "with weights in bfloat16" if _has_weights_in_half(cure) else f"under autocast to {_half(evidence)}"


def _idle_autocast(evidence: Evidence) -> str:
    """What is to be said of an autocast that was in force for another device."""
    regions = {tuple(region.split(":")) for f in facts_named(evidence, "autocast") for region in f.text.split(",")}
    device = "cpu" if evidence.workload.device == "cpu" else "cuda"
    others = sorted({kind for kind, *_ in regions if kind != device})
    if others:
        return f" (the script's autocast is for {' and '.join(others)} and does nothing here)"
    return " (the script's autocast is to float32 and changes nothing)" if regions else ""


def _edit(evidence: Evidence, cure: PricedCure) -> str:
    if _has_weights_in_half(cure):
        return "model.to(torch.bfloat16) once before the loop, and inputs in floating point with it"
    device, half = "cpu" if evidence.workload.device == "cpu" else "cuda", _half(evidence)
    if is_in_library(cure.where):
        short, long = ("bf16", "bf16-mixed") if half == "bfloat16" else ("fp16", "16-mixed")
        return (
            f"have what runs this loop do it: TrainingArguments({short}=True) in transformers, precision='{long}' in Lightning, "
            f"mixed_precision='{short}' in Accelerate; no autocast around this line: it would cast the weights once for all steps"
        )
    scaler = "; float16 needs torch.amp.GradScaler around backward and step" if half == "float16" else ""
    scope = "this call and the loss, not the backward" if cure.has_backward else "this call"
    edit = f"with torch.autocast('{device}', dtype=torch.{half}): around {scope}; weights stay in float32{scaler}"
    return edit + _with_logits(evidence) + _to_leave_out(evidence)


def _with_logits(evidence: Evidence) -> str:
    """What a loss of probabilities needs: in 8 bits those near 1 are 1, and on a GPU autocast refuses it with an error."""
    if all(o.op != "aten.binary_cross_entropy" for o in evidence.operators):
        return ""
    return (
        "; F.binary_cross_entropy_with_logits in place of the sigmoid and the loss, which needs more than 8 bits near 1"
    )


def _to_leave_out(evidence: Evidence) -> str:
    """A warning of the line that compares or sorts what was just multiplied (distances): 8 bits can decide otherwise."""
    trace = evidence.trace
    for call, row in enumerate(trace.operator):
        operator, where = evidence.operators[row], evidence.source_of(evidence.operators[row].source)
        is_own = where is not None and not where.via and operator.phase == "forward" and operator.module
        if where is None or not is_own or operator.op not in _COMPARISONS or not _is_large_float(operator):
            continue
        if _comes_from_product(evidence, trace.producers[call], _NEAR):
            place = short_place(where.file, where.line)
            return f"; numbers that {place} compares or sorts are computed outside it: 8 bits decide otherwise"
    return ""


def _comes_from_product(evidence: Evidence, calls: tuple[int, ...], depth: int) -> bool:
    """Whether a product lies so few operators before these calls, without a softmax or a nonlinearity in between."""
    for call in (c for c in calls if c >= 0):
        op = evidence.operators[evidence.trace.operator[call]].op
        is_linear = op not in _NONLINEAR
        if op in _PRODUCTS or (
            is_linear and depth > 0 and _comes_from_product(evidence, evidence.trace.producers[call], depth - 1)
        ):
            return True
    return False


def _is_large_float(operator: Operator) -> bool:
    return bool(operator.inputs) and "float" in operator.inputs[0].dtype and operator.inputs[0].num_elements >= _MANY


RULE = rule(
    __name__, check, propose=propose, note=note, is_cure=True, title="Products in float32 beside faster 16-bit units"
)
