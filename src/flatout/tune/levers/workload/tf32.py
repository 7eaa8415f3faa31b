"""Float32 products run on the matrix units, in TF32.

What        `torch.set_float32_matmul_precision` before the script starts and again when a model is first called, TF32 for
            convolutions too.
Guarantee   BOUNDED at TF32: factors are rounded to ten bits after the point, sums stay in float32.
Refuses     Processors; scripts that allow it already; models with few float32 products, or under autocast.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Final

from flatout.core.errors import EditError, LeverRefused, PlanError
from flatout.core.parts import lever
from flatout.core.records.evidence import Evidence
from flatout.core.records.finding import Finding
from flatout.core.records.lever import Candidate, Hooks, Parameters
from flatout.machine.cost.accounting import model_seconds, setting_of
from flatout.machine.cost.matrix_units import is_autocast
from flatout.tune.levers.proposals import rounded_products
from flatout.tune.rewrite.imports import below_imports, with_import
from flatout.tune.rewrite.source import parsed, statements

if TYPE_CHECKING:
    from torch import nn

_LEVELS: Final = ("high", "medium")
_FASTER: Final = 1.3
_EFFORT: Final = 3.0
"""The first trial also runs the script in TF32 to see what it rounds; and exact levers come before coarse ones."""


def propose(evidence: Evidence, findings: Sequence[Finding]) -> Iterator[Candidate]:
    """Propose it where float32 products are much of a step, and TF32 ones were measured to be faster."""
    if evidence.workload.device == "cpu":
        raise LeverRefused("TF32 is a format of GPUs")
    if setting_of(evidence, "float32_matmul_precision") in _LEVELS:
        raise LeverRefused("the script allows TF32 already")
    if is_autocast(evidence):
        raise LeverRefused("the models run under autocast")
    products = rounded_products(evidence, "tf32", trial="tf32", least_rate=_FASTER)
    most_s = min(model_seconds(evidence), 1.1 * products.seconds * (1 - 1 / products.rate))
    saved_s = products.tried_s or (0.2 * most_s, most_s)
    yield Candidate(parameters={"level": "high"}, saved_s=saved_s, because=products.because)


def apply(hooks: Hooks, parameters: Parameters) -> None:
    """Allow TF32 at the start, and again at a model's first call: a script may set its own precision in between."""
    level = parameters.get("level", "high")
    if level not in _LEVELS:
        raise PlanError(f"level {level!r} is none of {', '.join(_LEVELS)}; see torch.set_float32_matmul_precision")

    def at_call(module: nn.Module) -> Callable[[], None]:
        hooks.note(LEVER.id)
        return _allow(str(level))

    hooks.at_start(lambda: _allow(str(level)))
    hooks.at_first_call(at_call)


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
    """Write one line that allows TF32 after the imports."""
    if "set_float32_matmul_precision" in text or "allow_tf32" in text or "fp32_precision" in text:
        raise EditError("the file sets the precision of products itself")
    line = f'torch.set_float32_matmul_precision("{parameters.get("level", "high")}")\n'
    return below_imports(with_import(parsed(text), "torch"), statements(line)).code


LEVER = lever(
    __name__,
    propose,
    apply=apply,
    conflicts=("workload.mixed-precision",),
    edit=edit,
    effort=_EFFORT,
    dtype=lambda parameters: "tf32",
    title="Products in TF32",
)
