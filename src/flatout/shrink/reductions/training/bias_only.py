"""Only the biases of layers and norms are trained.

What        `flatout.core.records.adapt.BitFit`: biases of layers and norms (Ben Zaken et al. 2022), nothing else.
Guarantee   QUALITY: the metric tells. The outputs before the first step are the model's.
Price       After as many steps as full training, 3 seeds, 95 % intervals (`bench/adapting_quality.py`): 33 points of accuracy
            with an MLP of 256 (31 to 36), 65 with a CNN of 32 (63 to 67), digits turned by a quarter; 0.45 bits a character (0.43
            to 0.47) with a transformer of 64, from prose to code. Gains (`bench/adapting.py`): 0.3 to 1 % of gradients and
            moments stay; a step takes 0.49 of full training's with an MLP of 1024, 0.63 with a transformer of 256, 0.79 to 0.92
            with a GRU, a CNN and a U-Net. One thread of a Xeon. Not worth it on models as small as these: `training.last-layers`
            was faster and lost less on all three.
Refuses     Models without biases.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from flatout.core.parts import reduction
from flatout.core.records.adapt import BitFit
from flatout.core.records.lever import Parameters
from flatout.core.records.reduction import Option, ReductionRefusal

if TYPE_CHECKING:
    from flatout.shrink.candidate import CandidateModel

_RATE: Final = 10.0
"""Times the learning rate of full training: Ben Zaken et al. 2022 took 1e-4 to 1e-3 where full training took 1e-5 to 1e-4."""


def options(candidate: CandidateModel) -> Iterator[Option | ReductionRefusal]:
    """One option: all biases are trained."""
    yield Option(reduction=REDUCTION.id, name="biases only", because="a bias's gradient is a sum, a weight's a product")


def apply(candidate: CandidateModel, parameters: Parameters) -> CandidateModel:
    """Raises UsageError where the model has no biases."""
    return candidate.adapted(BitFit(), _RATE)


REDUCTION = reduction(__name__, options, apply)
