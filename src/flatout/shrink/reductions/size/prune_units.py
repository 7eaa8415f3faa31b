"""Channels, heads and hidden units that matter least are taken out: a smaller dense model.

What        `flatout.shrink.prune.prune`: a share of the units of every group that belongs together, over the exported
            graph; the widths of carried states with them. What is left equals the model with those masked, proved each time.
Guarantee   QUALITY: the metric tells. Without training it falls soon; `recovery.distil` brings it back.
Price       Half of all units, one seed (`bench/distilling.py`): without training accuracy on digits falls from 97.8 to 90.3 %
            (MLP of 128) and from 99.5 to 37.7 % (CNN of 32), a transformer of 64, half of its heads and hidden units, from 1.78
            to 5.40 bits a character. After `recovery.distil`: 97.5 %, 99.3 %, 1.78. A quarter without training moves outputs by
            12 to 44 % of their scale, for 1.1 to 1.5 times the speed (`bench/shrinking.py`, eleven models of random weights).
            Half gains 1.4 times (U-Net) to 3.4 (GRU cell of 512), and 25 to 28 % of the weights stay (`bench/pruning.py`). One
            thread of a Xeon. Not worth it without data to train on again.
Refuses     Models that cannot be exported, and units that an operator pins, by name and line.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from flatout.core.errors import PlanError
from flatout.core.parts import reduction
from flatout.core.records.lever import Parameters
from flatout.core.records.reduction import Option, ReductionRefusal

if TYPE_CHECKING:
    from torch import Tensor, nn

    from flatout.shrink.candidate import CandidateModel

_FRACTIONS: Final = (0.25, 0.5, 0.75, 0.875)
_NUM_BATCHES: Final = 8
"""Of the data, for the importance of units."""


def options(candidate: CandidateModel) -> Iterator[Option | ReductionRefusal]:
    """Shares of the units, from a quarter on."""
    for step, fraction in enumerate(_FRACTIONS):
        yield Option(
            reduction=REDUCTION.id,
            name=f"prune {fraction:.1%}".replace(".0%", "%"),
            parameters={"fraction": fraction},
            because="units that matter least cost as much as the others",
            step=step,
        )


def apply(candidate: CandidateModel, parameters: Parameters) -> CandidateModel:
    """Prune by the loss's gradient where there are data and a loss, else by magnitude. Raises PlanError when nothing can go."""
    from itertools import islice

    from flatout.shrink.candidate import arguments
    from flatout.shrink.prune import prune

    fraction, task, judge = parameters.get("fraction"), candidate.task, candidate.task.loss
    if not isinstance(fraction, float) or not 0 < fraction < 1:
        raise PlanError(f"parameter 'fraction' is {fraction!r} and must be a number between 0 and 1")
    has_loss = task.batches is not None and judge is not None and not task.num_state

    def loss(model: nn.Module, batch: Any) -> Tensor:
        inputs, targets = batch
        assert judge is not None
        return judge(model(*arguments(inputs)), targets)

    pruned = prune(
        candidate.model,
        candidate.inputs,
        fraction=fraction,
        importance="taylor" if has_loss else "magnitude",
        batches=[*islice(task.batches(), _NUM_BATCHES)] if has_loss and task.batches is not None else (),
        loss=loss if has_loss else None,
        num_state=task.num_state,
        seed=task.seed,
    )
    split = len(candidate.inputs) - task.num_state
    inputs = (*candidate.inputs[:split], *pruned.map_state(*candidate.inputs[split:])) if task.num_state else None
    before, after = (sum(p.numel() for p in model.parameters()) for model in (candidate.model, pruned.model))
    note = f"{after:,} of {before:,} parameters stay"
    if pruned.report.pinned:
        note += f"; {len(pruned.report.pinned)} groups of units are pinned"
    return candidate.with_model(pruned.model, note, inputs=inputs)


REDUCTION = reduction(__name__, options, apply, title="Fewer channels, heads and hidden units")
