"""Operators' times as they are in the timed step.

They are recorded in a few steps, and put right by the light steps next to those. A machine whose speed drifts, and steps that
grow, make those steps longer or shorter than the median of all, which is what a report speaks of.
"""

from __future__ import annotations

import msgspec

from flatout.core.records.evidence import Constant, Evidence, Operator


def in_timed_step(evidence: Evidence) -> Evidence:
    """The evidence with its operators scaled from the steps near the recorded ones to the timed step.

    On a device, where operators are timed by kernels, and on several ranks, whose own work alone they add up to, as they are.
    """
    nearby_s, step_s = evidence.observing.nearby_step_s, evidence.steps.step_s
    if not nearby_s or step_s <= 0 or evidence.steps.device_s is not None or evidence.distributed is not None:
        return evidence
    factor = step_s / nearby_s
    return msgspec.structs.replace(
        evidence,
        operators=tuple(_scaled(o, factor) for o in evidence.operators),
        constants=tuple(_constant_scaled(c, factor) for c in evidence.constants),
        observing=msgspec.structs.replace(evidence.observing, nearby_step_s=step_s),
    )


def _scaled(operator: Operator, factor: float) -> Operator:
    return msgspec.structs.replace(operator, op_s=factor * operator.op_s, python_s=factor * operator.python_s)


def _constant_scaled(constant: Constant, factor: float) -> Constant:
    return msgspec.structs.replace(constant, seconds=factor * constant.seconds)
