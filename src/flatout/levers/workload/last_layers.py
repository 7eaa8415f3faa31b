"""Only the last layers are trained; backward ends where they begin.

What        `flatout.adapting.freeze`: everything before the last modules is frozen.
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

from flatout.levers.training import adapted
from flatout.records.lever import Lever, Offer, Parameters, Reduction, Refusal, integer

if TYPE_CHECKING:
    from flatout.levers.subjects import Subject

_RATE: Final = 1.0
"""Times the learning rate of full training: the same weights, only fewer."""


def offers(subject: Subject) -> Iterator[Offer | Refusal]:
    """The last module, and the last three, where there are more."""
    num = sum(1 for m in subject.model.modules() if any(True for _ in m.parameters(recurse=False)))
    if num < 2:
        yield Refusal(lever=LEVER.id, because="the model has a single module with parameters")
    for last in (1, 3):
        if last < num:
            name = f"last {last} layers" if last > 1 else "last layer"
            because = "nothing before it is gone through backwards"
            yield Offer(lever=LEVER.id, name=name, parameters={"last": last}, because=because)


def apply(subject: Subject, parameters: Parameters) -> Subject:
    """Raises UsageError where the model has fewer modules."""
    from flatout.adapting.front import freeze

    return adapted(subject, freeze(subject.model, last=integer(parameters, "last")), _RATE)


LEVER = Lever(
    id="workload.last-layers",
    title="Only the last layers are trained",
    guarantee="quality",
    module=__name__,
    reduction=Reduction(kind="training", offers=offers, apply=apply),
)
