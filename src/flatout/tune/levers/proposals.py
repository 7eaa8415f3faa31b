"""What several levers propose in the same way."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

from flatout.core.errors import LeverRefused
from flatout.core.parts import lever
from flatout.core.records.evidence import Evidence
from flatout.core.records.finding import Finding
from flatout.core.records.lever import Candidate, Lever, Parameters
from flatout.core.records.trial import ModelVariant
from flatout.machine.cost.accounting import milliseconds
from flatout.machine.cost.matrix_units import rate_over_float32, seconds_of_products, tried_saving
from flatout.tune.rewrite.source import Edit, editable_place, local_proposals

_SMALL_PART: Final = 0.1
"""Of a step: what products in another type gain is less than that."""

_MOSTLY_IDLE: Final = 0.25
"""A device that is busy for less of a step waits for its host even when the model is compiled."""

_OVER_POSITIONS: Final = ("mkldnn_rnn_layer", "_cudnn_rnn", "miopen_rnn", "aten.convolution")
"""Operators whose results at the last words change with what stands behind them."""
_PACKS: Final = "aten._pack_padded_sequence"

Propose = Callable[[Evidence, Sequence[Finding]], Iterator[Candidate]]


def reads_padding(evidence: Evidence) -> bool:
    """Whether layers go over positions one after the other, or over their neighbours, without being told where rows end."""
    names = [o.op for o in evidence.operators if o.phase == "forward"]
    return _PACKS not in names and any(part in name for name in names for part in _OVER_POSITIONS)


def as_found(else_because: str, *, parameters: Parameters | None = None, edit: Edit | None = None) -> Propose:
    """A lever's `propose`: a candidate with the gain of the first finding; refused with `else_because` where there is none.

    Its parameters are `parameters` and, where `edit` is certain of the finding's line, the place of that.
    """

    def propose(evidence: Evidence, findings: Sequence[Finding]) -> Iterator[Candidate]:
        if not findings:
            raise LeverRefused(else_because)
        first = findings[0]
        place = editable_place(evidence, first.where, edit) if edit is not None else {}
        yield Candidate(
            parameters=place | (parameters or {}), saved_s=first.saved_s, where=first.where, because=first.because
        )

    return propose


class RoundedProducts(NamedTuple):
    """Float32 products that a coarser type would make `rate` times as fast: `seconds` of a step, what a trial saved."""

    seconds: float
    rate: float
    tried_s: tuple[float, float] | None
    because: str


def rounded_products(evidence: Evidence, dtype: str, *, trial: ModelVariant, least_rate: float) -> RoundedProducts:
    """What products in `dtype` would gain.

    Raises LeverRefused where they are few, the device waits, or they were not measured to be `least_rate` times as fast.
    """
    seconds, rate = seconds_of_products(evidence, is_finer_than=dtype), rate_over_float32(evidence, dtype)
    name = dtype.replace("tf32", "TF32")
    if seconds < _SMALL_PART * evidence.steps.whole_s:
        finer = ", those not in TF32 already," if seconds < seconds_of_products(evidence) else ""
        raise LeverRefused(f"float32 products{finer} are a small part of a step")
    steps = evidence.steps
    if steps.device_s is not None and steps.device_s < _MOSTLY_IDLE * steps.step_s:
        raise LeverRefused("the device waits for its host most of a step")
    if rate is None:
        raise LeverRefused(f"how fast {name} products are on this machine was not measured")
    if rate < least_rate:
        compared = f"{rate:.1f} times as fast as" if rate >= 1 else "slower than"
        raise LeverRefused(
            f"{name} products were measured to be {compared} float32 ones on this machine: no units for them"
        )
    tried_s = tried_saving(evidence, trial)
    because = (
        f"float32 products take {milliseconds(seconds)} of a step; in {name} they were measured {rate:.1f} times as fast "
        "on this machine"
    )
    return RoundedProducts(seconds, rate, None if tried_s is None else (0.7 * tried_s, 1.15 * tried_s), because)


def source_lever(
    module: str,
    edit: Edit,
    *,
    title: str,
    else_because: str,
    findings: Callable[[Evidence, Sequence[Finding]], Sequence[Finding]] = lambda evidence, found: found,
    loops: Sequence[bool] = (False,),
    saved_fraction: tuple[float, float] = (1.0, 1.0),
    cost_fraction: float = 0.0,
) -> Lever:
    """The lever of a module that is an edit of the source at one place, proposed wherever it is certain.

    Args:
        module: The module's `__name__`.
        edit: The change of the text.
        title: What reports print.
        else_because: Why the lever is refused where nothing was found.
        findings: Which findings, with which lines, are tried; those that name the lever, as they are, by default.
        loops, saved_fraction, cost_fraction: As `local_proposals` takes them.
    """

    def propose(evidence: Evidence, found: Sequence[Finding]) -> Iterator[Candidate]:
        yield from local_proposals(
            evidence,
            findings(evidence, found),
            edit,
            else_because=else_because,
            loops=loops,
            saved_fraction=saved_fraction,
            cost_fraction=cost_fraction,
        )

    return lever(module, propose, edit=edit, is_local=True, title=title)
