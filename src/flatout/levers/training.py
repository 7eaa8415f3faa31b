"""What levers that train fewer parameters do to a subject, in the same words."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flatout.adapting.adapted import Adapted
    from flatout.levers.subjects import Subject


def adapted(subject: Subject, found: Adapted, rate_factor: float) -> Subject:
    """The subject whose model was adapted in place: it is a copy already."""
    trained = found.trained
    told = f"{trained.parameters:,} of {trained.of_parameters:,} parameters are trained"
    return replace(subject.having(found.model, told), trained=[*found.parameters()], rate_factor=rate_factor)
