"""Learned vectors in front of the tokens are trained.

What        `flatout.core.records.adapt.Prompt`: vectors before the embedded tokens (Lester et al. 2021); their outputs are cut
            off. They come behind an embedding or before a module: the first such place where a copy of the model runs with them,
            and gives other numbers of the same shapes.
Guarantee   QUALITY: the metric tells.
Price       Nearly all that training would bring: after 180 steps from prose to code a transformer of 64 was 0.70 bits a character
            behind full training (3 seeds, 95 % interval 0.67 to 0.73), 8 % of the way (`bench/adapting_quality.py`). Every call
            works on more tokens: 1.7 times as long with 8 vectors before 32. Gains (`bench/adapting.py`, transformer of 256):
            0.1 % of gradients and moments stay; a step takes 0.71 of full training's. One thread of a Xeon. Not worth it on
            models as small as these: `training.last-layers` loses half as much and takes less than half of the time.
Refuses     Models without an embedding, or without such a place.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

from flatout.core.errors import UsageError
from flatout.core.parts import reduction
from flatout.core.records.adapt import Prompt
from flatout.core.records.lever import Parameters, integer, string
from flatout.core.records.reduction import Option, ReductionRefusal

if TYPE_CHECKING:
    from flatout.shrink.candidate import CandidateModel

_RATE: Final = 30.0
"""Times the learning rate of full training: Lester et al. 2021 took 0.3 with Adafactor where tuning took 1e-3."""
_NUM_VECTORS: Final = 8


def options(candidate: CandidateModel) -> Iterator[Option | ReductionRefusal]:
    """One option, for models with an embedding and a place for the vectors."""
    from torch import nn

    kinds = {path: type(module) for path, module in candidate.model.named_modules() if path}
    embeddings = [path for path, kind in kinds.items() if issubclass(kind, nn.Embedding)]
    if not embeddings:
        yield ReductionRefusal(reduction=REDUCTION.id, because="no embedding makes vectors of tokens")
        return
    place = _place(candidate, [{"after": path} for path in embeddings] + [{"before": path} for path in kinds])
    if place is None:
        because = "nowhere do vectors in front of the tokens change what the model gives, and can be cut off again"
        yield ReductionRefusal(reduction=REDUCTION.id, because=because)
    else:
        name, because = f"prompt of {_NUM_VECTORS}", "nothing of the model is trained"
        yield Option(reduction=REDUCTION.id, name=name, parameters=place, because=because)


def _place(candidate: CandidateModel, tried: Sequence[Parameters]) -> Parameters | None:
    """The first place where a copy of the model runs with the prompt and gives other numbers of the same shapes."""
    import torch

    from flatout.core.tensors.nests import tensors_in
    from flatout.shrink.adapt.adapted_model import adapt

    model = copy.deepcopy(candidate.model).eval()
    with torch.no_grad():
        before = [*tensors_in(model(*candidate.inputs))]
        for parameters in (one | {"num_vectors": _NUM_VECTORS} for one in tried):
            try:
                adapted = adapt(model, _prompt(parameters), seed=candidate.task.seed)
            except UsageError:
                continue
            try:
                after = [*tensors_in(model(*candidate.inputs))]
            except (
                UsageError,
                RuntimeError,
                TypeError,
                ValueError,
                IndexError,
                AssertionError,
            ):  # the model's own, too
                continue
            finally:
                adapted.undo()
            have_same_shapes = [a.shape for a in after] == [b.shape for b in before]
            if have_same_shapes and not all(map(torch.equal, after, before)):
                return parameters
    return None


def _prompt(parameters: Parameters) -> Prompt:
    after, before = (string(parameters, side) if side in parameters else None for side in ("after", "before"))
    return Prompt(num_vectors=integer(parameters, "num_vectors"), after=after, before=before)


def apply(candidate: CandidateModel, parameters: Parameters) -> CandidateModel:
    """Raises UsageError where the place is none of the model's."""
    return candidate.adapted(_prompt(parameters), _RATE)


REDUCTION = reduction(__name__, options, apply, title="Vectors in front of the tokens are trained")
