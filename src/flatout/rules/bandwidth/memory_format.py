"""Convolutions in a memory format that is slower here.

Costs        A convolution in NCHW is transposed to the library's own blocked or channels-last format and back, or runs in a
             slower kernel.
Evidence     Convolutions on contiguous images that take a good share of the step. Trial: the module and its inputs in
             channels_last, forward and backward.
Levers       memory.channels-last
False alarm  Few channels, small images, processors whose kernels prefer NCHW: the trial says so.
"""

from __future__ import annotations

from collections.abc import Iterator

from flatout.cost.accounting import (
    around,
    kept_fraction,
    main_model,
    milliseconds,
    model_seconds,
    result_of,
    seconds_of,
)
from flatout.records.evidence import Evidence, Operator
from flatout.records.finding import Finding, Rule
from flatout.records.trial import TimeModel

_WORTH_A_TRIAL = 0.2
_LEAST_GAIN = 0.08
"""The format touches the whole model: for less than this, or than the trial's own spread, nobody should change it."""
_CONVOLUTIONS = ("convolution", "conv2d", "convolution_backward")


def propose(evidence: Evidence) -> Iterator[TimeModel]:
    """Time the module in channels_last."""
    trial = _trial_of(evidence)
    if trial is not None and seconds_of(evidence, _rows(evidence)) > _WORTH_A_TRIAL * evidence.steps.step_s:
        yield trial


def check(evidence: Evidence) -> Iterator[Finding]:
    """Yield one finding for the module."""
    rows, trial = _rows(evidence), _trial_of(evidence)
    result = result_of(evidence, trial) if trial is not None and rows else None
    if result is None or trial is None:
        return
    kept = kept_fraction(result)
    if 1 - kept < max(_LEAST_GAIN, result.spread_fraction):
        return
    saved_s = max(0.0, model_seconds(evidence) * (1 - kept))
    cost_s = seconds_of(evidence, rows)
    yield Finding(
        rule=RULE.id,
        regime="bandwidth",
        where=evidence.source_of(evidence.models[trial.model].source),
        cost_s=max(cost_s, saved_s),
        saved_s=around(saved_s, 0.15),
        because=f"convolutions on contiguous NCHW images take {milliseconds(cost_s)} a step; with module and images in "
        f"channels_last forward and backward take {kept:.0%} (tried)",
        edit="model = model.to(memory_format=torch.channels_last) once, images = images.to(memory_format=torch.channels_last) "
        "for each batch",
        module=evidence.models[trial.model].name,
        levers=RULE.levers,
        operators=rows,
        basis="trial",
    )


def _rows(evidence: Evidence) -> tuple[int, ...]:
    return tuple(i for i, o in enumerate(evidence.operators) if _is_nchw(o))


def _is_nchw(operator: Operator) -> bool:
    if not operator.op.removeprefix("aten.").removeprefix("mkldnn_").removeprefix("cudnn_").startswith(_CONVOLUTIONS):
        return False
    images = operator.inputs[1:2] if operator.phase == "backward" else operator.inputs[:1]  # a gradient has any strides
    return bool(images) and all(len(t.shape) == 4 and t.is_contiguous for t in images)


def _trial_of(evidence: Evidence) -> TimeModel | None:
    model = main_model(evidence)
    if model is None:
        return None
    return TimeModel(model=model, variant="channels-last", backward=evidence.models[model].num_graphs_used > 0)


RULE = Rule(
    id="bandwidth.memory-format",
    title="Convolutions in the slower memory format",
    module=__name__,
    check=check,
    propose=propose,
    levers=("memory.channels-last",),
)
