"""Learned vectors in front of the tokens are trained.

What        `flatout.adapting.prompt`: vectors in front of an embedding (Lester et al. 2021); their outputs are cut off.
Guarantee   QUALITY: the metric tells.
Price       Nearly all that training would bring: after 180 steps from prose to code a transformer of 64 was 0.70 bits a character
            behind full training (3 seeds, 95 % interval 0.67 to 0.73), 8 % of the way (`bench/adapting_quality.py`). Every call
            works on more tokens: 1.7 times as long with 8 vectors before 32. Gains (`bench/adapting.py`, transformer of 256):
            0.1 % of gradients and moments stay; a step takes 0.71 of full training's. One thread of a Xeon. Not worth it on
            models as small as these: `workload.last-layers` loses half as much and takes less than half of the time.
Refuses     Models without exactly one place where tokens become vectors.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from flatout.levers.training import adapted
from flatout.records.lever import Lever, Offer, Parameters, Reduction, Refusal, integer

if TYPE_CHECKING:
    from flatout.levers.subjects import Subject

_RATE: Final = 30.0
"""Times the learning rate of full training: Lester et al. 2021 took 0.3 with Adafactor where tuning took 1e-3."""


def offers(subject: Subject) -> Iterator[Offer | Refusal]:
    """To models with an embedding."""
    from torch import nn

    if any(isinstance(m, nn.Embedding) for m in subject.model.modules()):
        because = "nothing of the model is trained"
        yield Offer(lever=LEVER.id, name="prompt of 8", parameters={"num_vectors": 8}, because=because)
    else:
        yield Refusal(lever=LEVER.id, because="no embedding makes vectors of tokens")


def apply(subject: Subject, parameters: Parameters) -> Subject:
    """Raises UsageError where no single place is in front of the tokens."""
    from flatout.adapting.front import prompt

    found = prompt(subject.model, num_vectors=integer(parameters, "num_vectors"), seed=subject.purpose.seed)
    return adapted(subject, found, _RATE)


LEVER = Lever(
    id="workload.prompt-tuning",
    title="Vectors in front of the tokens are trained",
    guarantee="quality",
    module=__name__,
    reduction=Reduction(kind="training", offers=offers, apply=apply),
)
