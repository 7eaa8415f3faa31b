"""Float32 products run on the matrix units, in TF32.

What        `torch.set_float32_matmul_precision` before the script starts and again when a model is first called, TF32 for
            convolutions too.
Guarantee   BOUNDED at TF32: factors are rounded to ten bits after the point, sums stay in float32.
Refuses     Processors; scripts that allow it already; models with few float32 products, or under autocast.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Final

from flatout.cost.accounting import milliseconds, model_seconds, setting_of
from flatout.cost.matrix_units import (
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
    from torch import nn

_LEVELS: Final = ("high", "medium")
_FASTER: Final = 1.3
_SMALL_PART: Final = 0.1
_EFFORT: Final = 3.0
"""The first trial also runs the script in TF32 to see what it rounds; and exact levers come before coarse ones."""


def propose(evidence: Evidence, findings: Sequence[Finding]) -> Iterator[Candidate | Refusal]:
    """Where float32 products are much of a step, and TF32 ones were measured to be faster."""
    products_s = seconds_of_products(evidence)
    rate = rate_over_float32(evidence, "tf32")
    why_not = _why_not(evidence, products_s, rate)
    if why_not:
        yield Refusal(lever=LEVER.id, because=why_not)
        return
    tried_s, rate = tried_saving(evidence, "tf32"), rate or _FASTER
    most_s = min(model_seconds(evidence), 1.1 * products_s * (1 - 1 / rate))
    yield Candidate(
        lever=LEVER.id,
        parameters={"level": "high"},
        saved_s=(0.7 * tried_s, 1.15 * tried_s) if tried_s is not None else (0.2 * most_s, most_s),
        because=f"float32 products take {milliseconds(products_s)} of a step; in TF32 they were measured {rate:.1f} times as "
        "fast on this machine",
    )


def _why_not(evidence: Evidence, products_s: float, rate: float | None) -> str:
    if evidence.workload.device == "cpu":
        return "TF32 is a format of GPUs"
    if setting_of(evidence, "float32_matmul_precision") in _LEVELS:
        return "the script allows TF32 already"
    if is_autocast(evidence):
        return "the models run under autocast"
    if products_s < _SMALL_PART * evidence.steps.whole_s:
        return "float32 products are a small part of a step"
    if waits_for_host(evidence):
        return "the device waits for its host most of a step"
    if rate is None:
        return "how fast TF32 products are on this machine was not measured"
    if rate < _FASTER:
        return f"TF32 products are {rate:.1f} times as fast as float32 ones on this machine: no units for them"
    return ""


def apply(seams: Seams, parameters: Parameters) -> None:
    """Allow it at the start, and again at a model's first call: a script may set its own precision in between."""
    level = parameters.get("level", "high")
    if level not in _LEVELS:
        raise PlanError(f"level {level!r} is none of {', '.join(_LEVELS)}; see torch.set_float32_matmul_precision")

    def at_call(module: nn.Module) -> Callable[[], None]:
        seams.note(LEVER.id)
        return _allow(str(level))

    seams.at_start(lambda: _allow(str(level)))
    seams.at_first_call(at_call)


def _allow(level: str) -> Callable[[], None]:
    """Set the precision; returns how to set what was there before."""
    import torch

    precision, convolutions = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision(level)
    torch.backends.cudnn.allow_tf32 = True

    def undo() -> None:
        torch.set_float32_matmul_precision(precision)
        torch.backends.cudnn.allow_tf32 = convolutions

    return undo


def edit(text: str, parameters: Parameters) -> str:
    """One line after the imports."""
    from flatout.levers.syntax.imports import below_imports, with_import
    from flatout.levers.syntax.source import parsed, statements

    if "set_float32_matmul_precision" in text or "allow_tf32" in text or "fp32_precision" in text:
        raise EditError("the file sets the precision of products itself")
    line = f'torch.set_float32_matmul_precision("{parameters.get("level", "high")}")\n'
    return below_imports(with_import(parsed(text), "torch"), statements(line)).code


LEVER = Lever(
    id="workload.tf32",
    title="Products in TF32",
    guarantee="bounded",
    module=__name__,
    propose=propose,
    apply=apply,
    conflicts=("workload.mixed-precision",),
    edit=edit,
    effort=_EFFORT,
    dtype=lambda parameters: "tf32",
)
