"""Whether a run that was observed would gain from float8: its device, its precision, and what it waits for."""

from __future__ import annotations

from flatout.core.errors import LeverRefused
from flatout.core.records.evidence import Evidence, Operator
from flatout.machine.cost.accounting import facts_named
from flatout.machine.cost.families import COMPILED_GRAPH
from flatout.machine.cost.matrix_units import waits_for_host
from flatout.machine.specs import catalog


def check_gains(evidence: Evidence) -> None:
    """Raise LeverRefused where nothing would run in float8, or it would gain nothing."""
    if evidence.workload.device == "cpu":
        raise LeverRefused("float8 is a format of GPUs")
    if evidence.steps.kind != "training":
        raise LeverRefused("the script does not train")
    reason = _device_refusal(evidence.workload.device)
    if reason:
        raise LeverRefused(reason)
    if not (_is_bfloat16(evidence) or _may_become_bfloat16(evidence)):
        raise LeverRefused(
            "products are neither in bfloat16 nor in float32, which workload.mixed-precision changes to it"
        )
    if waits_for_host(evidence):
        raise LeverRefused("the device waits for its host most of a step")


def _device_refusal(name: str) -> str | None:
    """The reason why a device gains nothing, by its data sheet, else by its compute capability if it is in this
    machine.
    """
    import torch

    from flatout.blocks.training.float8 import refusal

    spec = catalog.match(name)
    if torch.cuda.is_available() and torch.cuda.get_device_name() == name:
        return refusal("cuda")
    if spec is None:
        return f"whether '{name}' multiplies float8 is not known here"
    if spec.vendor != "NVIDIA":
        return "float8 training was measured on NVIDIA GPUs alone"
    return None if any(r.dtype == "float8" for r in spec.rates) else f"{spec.name} has no units for float8"


def float8_rate(evidence: Evidence) -> float:
    """Ratio of float8 products over bfloat16 ones, by the data sheet; 2 where there is none, as with all that have
    them.
    """
    spec = catalog.match(evidence.workload.device)
    rates = {r.dtype: r.flop_per_s.value for r in spec.rates} if spec is not None else {}
    return rates["float8"] / rates["bfloat16"] if {"float8", "bfloat16"} <= rates.keys() else 2.0


def _is_bfloat16(evidence: Evidence) -> bool:
    """Whether products run in bfloat16, by autocast or because the model's numbers are."""
    autocast = [fact.text for fact in facts_named(evidence, "autocast")]
    if autocast:
        return any("bfloat16" in text for text in autocast)
    products = [o for o in evidence.operators if o.op in ("aten.mm", "aten.addmm", COMPILED_GRAPH)]
    return any(t.dtype == "bfloat16" and len(t.shape) == 2 for o in products for t in o.inputs)


def _may_become_bfloat16(evidence: Evidence) -> bool:
    """Whether products run in float32, without autocast, on a device whose rate in bfloat16 was measured."""
    rate = evidence.machine.matmul_flop_per_s.get("bfloat16") if evidence.machine is not None else None
    products = [o for o in evidence.operators if o.op in ("aten.mm", "aten.addmm")]
    dtypes = {t.dtype for o in products for t in o.inputs if len(t.shape) == 2}
    return bool(rate) and not list(facts_named(evidence, "autocast")) and dtypes == {"float32"}


def bfloat16_seconds(evidence: Evidence, operator: Operator) -> float:
    """Seconds of a step that a product takes, or would take in bfloat16 where it is in float32: what float8 can make less of.

    Those are its FLOP at the rate of large products that was measured.
    """
    rates = evidence.machine.matmul_flop_per_s if evidence.machine is not None else {}
    if rates.get("bfloat16") and {t.dtype for t in operator.inputs} == {"float32"}:
        return min(operator.op_s, operator.flop * operator.num_calls / rates["bfloat16"])
    return operator.op_s


def compiles_graphs(evidence: Evidence) -> bool:
    """Whether the script compiles something itself."""
    return evidence.compilation is not None and evidence.compilation.num_graphs > 0
