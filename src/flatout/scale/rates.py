"""Rates of a device's data sheet as far as programs reach them, and the host's seconds for an operator."""

from __future__ import annotations

from flatout.core.errors import PlanError
from flatout.machine.cost.roofline import bandwidth_bytes_per_s, peak_flop_per_s
from flatout.machine.cost.waves import Rates
from flatout.machine.specs.catalog import load_spec
from flatout.scale.case import StepCase, rate_dtype


def rates_of(case: StepCase, dtype: str) -> Rates:
    """The rates of the device's data sheet, as far as they are reached."""
    spec, constants = load_spec(case.cluster.device), case.constants
    if spec.num_units is None:
        raise PlanError(f"the data sheet of '{spec.id}' does not say how many multiprocessors it has")
    return Rates(
        flop_per_s=peak_flop_per_s(spec, rate_dtype(dtype)) * constants.product_share,
        bytes_per_s=bandwidth_bytes_per_s(spec) * constants.memory_share,
        num_units=int(spec.num_units.value),
        fill_s=constants.fill_s,
        misaligned_share=constants.misaligned_share,
        kernel_s=constants.kernel_s,
    )


def started_s_of(case: StepCase) -> float:
    """Seconds of the host to start an operator on what tensor ranks may have divided."""
    has_divided = case.layout.tensor > 1 and case.software.divided_by == "tensors"
    return case.constants.divided_operator_s if has_divided else case.constants.operator_s
