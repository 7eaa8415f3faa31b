"""Only the last layers are trained; backward ends where they begin.

What        `flatout.core.records.adapt.Freeze`: everything before the last modules is frozen.
Guarantee   QUALITY: the metric tells. The outputs before the first step are the model's.
Price       After as many steps as full training, 3 seeds, 95 % intervals (`bench/adapting_quality.py`), the last three layers:
            0.1 points of accuracy with an MLP of 256 (-0.4 to 0.6; it has four), 9.5 with a CNN of 32 (8.1 to 11.1), digits
            turned by a quarter; 0.23 bits a character (0.22 to 0.24) with a transformer of 64, from prose to code; steps of 0.87,
            0.62 and 0.35 of full training's. The last one alone: 4.6 points, 42 points, 0.35 bits; steps of 0.44, 0.34 and 0.31.
            Wider CNN, GRU, transformer and U-Net, one or two layers: 0.24 to 0.43 (`bench/adapting.py`). One thread of a Xeon.
            Not worth it where what comes in has changed, as for the CNN on turned digits.
Refuses     Models of a single module.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from flatout.core.parts import reduction
from flatout.core.records.adapt import Freeze
from flatout.core.records.lever import Parameters, integer
from flatout.core.records.reduction import Option, ReductionRefusal

if TYPE_CHECKING:
    from flatout.shrink.candidate import CandidateModel

_RATE: Final = 1.0
"""Times the learning rate of full training: the same weights, only fewer."""


def options(candidate: CandidateModel) -> Iterator[Option | ReductionRefusal]:
    """The last module, and the last three, where there are more."""
    num = sum(1 for m in candidate.model.modules() if any(True for _ in m.parameters(recurse=False)))
    if num < 2:
        yield ReductionRefusal(reduction=REDUCTION.id, because="the model has a single module with parameters")
    for last in (1, 3):
        if last < num:
            name = f"last {last} layers" if last > 1 else "last layer"
            because = "nothing before it is gone through backwards"
            yield Option(reduction=REDUCTION.id, name=name, parameters={"last": last}, because=because)


def apply(candidate: CandidateModel, parameters: Parameters) -> CandidateModel:
    """Raises UsageError where the model has fewer modules."""
    return candidate.adapted(Freeze(last=integer(parameters, "last")), _RATE)


REDUCTION = reduction(__name__, options, apply, title="Only the last layers are trained")
