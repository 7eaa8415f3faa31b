"""Small bottlenecks behind frozen modules are trained.

What        `flatout.core.records.adapt.Bottleneck`: down, ReLU, up, added to what a module gives (Houlsby et al. 2019).
Guarantee   QUALITY: the metric tells. Before the first step the outputs are the model's, bit for bit.
Price       After as many steps as full training, 3 seeds, 95 % intervals (`bench/adapting_quality.py`): 1.3 points of accuracy
            with an MLP of 256 (0.5 to 2.2), 3.9 with a CNN of 32 (2.9 to 5.0), digits turned by a quarter; 0.22 bits a character
            (0.21 to 0.23) with a transformer of 64, from prose to code. They stay in the model: calls took 1.7 times as long.
            Gains (`bench/adapting.py`): 3 to 11 % of gradients and moments stay; a step takes 0.28 of full training's with a GRU
            of 128, 0.60 with an MLP of 1024, 0.89 with a transformer of 256. One thread of a Xeon. Not worth it in convolutions
            (0.99 and 1.23), nor for new classes: the head stays frozen (CNN: 38 % right, 0 to 88 by seed, of 98 %).
Refuses     Models without modules to put them behind.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from flatout.core.parts import reduction
from flatout.core.records.adapt import Bottleneck
from flatout.core.records.lever import Parameters, integer
from flatout.core.records.reduction import Option, ReductionRefusal

if TYPE_CHECKING:
    from flatout.shrink.candidate import CandidateModel

_RATE: Final = 4.0
"""Times the learning rate of full training: what is trained starts at zero and is small."""


def options(candidate: CandidateModel) -> Iterator[Option | ReductionRefusal]:
    """One option, bottlenecks of one width."""
    because = "gradients and moments of the weights are neither computed nor kept"
    yield Option(reduction=REDUCTION.id, name="bottlenecks of 16", parameters={"width": 16}, because=because)


def apply(candidate: CandidateModel, parameters: Parameters) -> CandidateModel:
    """Raises UsageError where the model has nothing to put bottlenecks behind."""
    return candidate.adapted(Bottleneck(width=integer(parameters, "width")), _RATE)


REDUCTION = reduction(__name__, options, apply, title="Bottlenecks behind frozen modules are trained")
