"""What a look into a job's steps found, in the form that its record has."""

from __future__ import annotations

import os
from collections import Counter
from typing import Final

import msgspec

from flatout.core.records.evidence import Evidence
from flatout.core.records.finding import Diagnosis
from flatout.core.records.job import JobFinding, JobRecord
from flatout.machine.specs.catalog import match

_MOST: Final = 5
"""Causes of a job that are stored, the costliest first."""


def with_diagnosis(record: JobRecord, evidence: Evidence, diagnosis: Diagnosis, *, has_tf32: bool) -> JobRecord:
    """The record with what the look found: causes, phases, model, FLOP, the step. `has_tf32`: float32 products may use TF32."""
    steps, model = evidence.steps, max(evidence.models, key=lambda m: m.call_s, default=None)
    flop = sum(o.flop * o.num_calls for o in evidence.operators)
    findings = tuple(
        JobFinding(
            rule=finding.rule,
            title=finding.title,
            file=_shown_path(finding.file),
            line=finding.line,
            regime=finding.regime,
            share=finding.share,
            gain=finding.gain,
            because=finding.because,
            edit=finding.edit,
            basis=finding.basis,
        )
        for finding in diagnosis.findings
        if finding.saves_time
    )
    whole_s = steps.whole_s
    device_fraction = steps.device_s / steps.step_s if steps.device_s is not None and steps.step_s > 0 else None
    return msgspec.structs.replace(
        record,
        step_s=steps.step_s,
        low_s=steps.low_s,
        high_s=steps.high_s,
        findings=findings[:_MOST],
        saved_fraction=min(1.0, diagnosis.explained_s / diagnosis.step_s) if diagnosis.step_s > 0 else None,
        phases={name: s / whole_s for name, s in steps.phases_of_whole.items()} if whole_s > 0 else {},
        model=model.name if model is not None else record.model,
        num_parameters=evidence.workload.num_parameters or record.num_parameters,
        flop_per_step=flop or None,
        mfu=flop_utilisation(evidence, flop / steps.step_s, has_tf32=has_tf32) if flop and steps.step_s > 0 else None,
        utilisation=min(1.0, device_fraction)
        if record.utilisation is None and device_fraction is not None
        else record.utilisation,
    )


def _shown_path(file: str) -> str:
    """A file's path from the working directory, where it lies below that."""
    path = os.path.relpath(file) if os.path.isabs(file) else file
    return file if path.startswith("..") else path


def flop_utilisation(evidence: Evidence, flop_per_s: float, *, has_tf32: bool) -> float | None:
    """FLOP a second over the data sheet's dense rate in the dtype that most of the FLOP have; None without a data sheet."""
    spec = match(evidence.workload.device)
    by_dtype: Counter[str] = Counter()
    for operator in evidence.operators:
        if operator.flop and operator.inputs:
            by_dtype[operator.inputs[0].dtype] += int(operator.flop * operator.num_calls)
    if spec is None or not by_dtype:
        return None
    dtype = by_dtype.most_common(1)[0][0]
    wanted = "tf32" if dtype == "float32" and has_tf32 else dtype
    rates = [rate.flop_per_s.value for rate in spec.rates if rate.dtype == wanted]
    return min(1.0, flop_per_s / max(rates)) if rates else None
