"""Convolutions in a memory format that is slower here.

Costs        A convolution in NCHW is transposed to the library's own blocked or channels-last format and back, or runs in a
             slower kernel.
Evidence     Convolutions on contiguous images that take a good share of the step. Trial: the module and its inputs in
             channels_last, forward and backward, and on its images the script's own `.view` calls and the other root modules.
Levers       memory.channels-last
False alarm  Images of one channel or one pixel: both formats are the same bytes, and nothing is tried. Few channels, small
             images, processors whose kernels prefer NCHW: the trial says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from flatout.core.parts import rule
from flatout.core.records.evidence import Evidence, Model, Operator, TensorSpec
from flatout.core.records.finding import Finding
from flatout.core.records.trial import TimeModel
from flatout.machine.cost.accounting import around, milliseconds, model_seconds, model_trial
from flatout.machine.cost.suspects import SuspectRows, proposing, tried

_WORTH_A_TRIAL = 0.2
_LEAST_GAIN = 0.08
"""The format touches the whole model: for less than this, or than the trial's own spread, nobody should change it."""
_CONVOLUTIONS = ("convolution", "conv2d", "convolution_backward")


def check(evidence: Evidence) -> Iterator[Finding]:
    """Yield one finding for the module."""
    for module in tried(evidence, _convolutions):
        if 1 - module.remaining < max(_LEAST_GAIN, module.result.spread_fraction):
            continue
        model = evidence.models[module.suspect.trial.model]
        saved_s = max(0.0, model_seconds(evidence) * (1 - module.remaining))
        yield Finding(
            where=evidence.source_of(model.source),
            cost_s=max(module.cost_s, saved_s),
            saved_s=around(saved_s, 0.15),
            because=f"convolutions on contiguous NCHW images take {milliseconds(module.cost_s)} a step; with module and images "
            f"in channels_last forward and backward take {module.remaining:.0%} (tried)",
            edit=f"{_edit(evidence, model)}{_alone(evidence, model)}",
            module=model.name,
            operators=module.suspect.rows,
            basis="trial",
        )


def _edit(evidence: Evidence, model: Model) -> str:
    """The module's format, and that of the images where it takes any: a generator makes them from a vector."""
    once = "model = model.to(memory_format=torch.channels_last) once"
    first = [o for o in evidence.operators if o.phase == "forward" and o.module.partition(".")[0] == model.name][:1]
    takes_images = not first or any(len(t.shape) == 4 for t in first[0].inputs[:1])
    return f"{once}, images = images.to(memory_format=torch.channels_last) for each batch" if takes_images else once


def _alone(evidence: Evidence, model: Model) -> str:
    """Which module was tried, where the step calls several: another may have a `.view` that the format breaks."""
    return f"; {model.name} alone was tried" if {m.name for m in evidence.models} != {model.name} else ""


def _convolutions(evidence: Evidence) -> Iterator[SuspectRows[TimeModel]]:
    rows = tuple(i for i, o in enumerate(evidence.operators) if _is_nchw(o))
    trial = model_trial(evidence, "channels-last")
    if trial is not None and any(_has_order(t) for i in rows for t in _images(evidence.operators[i])):
        yield SuspectRows(rows, trial)


def _is_nchw(operator: Operator) -> bool:
    if not operator.op.removeprefix("aten.").removeprefix("mkldnn_").removeprefix("cudnn_").startswith(_CONVOLUTIONS):
        return False
    images = _images(operator)
    return bool(images) and all(len(t.shape) == 4 and t.is_contiguous for t in images)


def _images(operator: Operator) -> tuple[TensorSpec, ...]:
    return operator.inputs[1:2] if operator.phase == "backward" else operator.inputs[:1]  # a gradient has any strides


def _has_order(images: TensorSpec) -> bool:
    """Whether channels last puts the bytes in another order: there are several channels of several pixels."""
    return images.shape[1] > 1 and prod(images.shape[2:]) > 1


RULE = rule(
    __name__,
    check,
    propose=proposing(_convolutions, worth=_WORTH_A_TRIAL),
    title="Convolutions in the slower memory format",
)
