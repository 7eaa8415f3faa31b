"""Much of the arithmetic is on padding.

Costs        The share of every product and pointwise operator that works on padded positions.
Evidence     Trailing constants in the batch's tensors, with something that says they are padding (integer tokens, padding_idx,
             a mask, lengths). Trial: the model's forward and backward on the same batch, cropped to its longest row and to its
             mean length, rounded up, and in turn to the next shorter and longer length: batches differ, and kernels and
             memory for one shape do not serve another.
Levers       communication.trim-padding, communication.bucket-lengths
False alarm  Batches that are packed before the arithmetic (pack_padded_sequence). Images with black borders, tokens that repeat:
             without a sign of padding, or where the model refuses shorter input or gets no faster, nothing is said. Batches
             that each have a length of their own: oneDNN builds its kernels anew for each, so the edit rounds lengths up.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil

from flatout.core.parts import rule
from flatout.core.records.evidence import Evidence, Padding
from flatout.core.records.finding import Finding
from flatout.core.records.trial import TimeModel, TrialResult
from flatout.core.records.workload import Source
from flatout.machine.cost.accounting import milliseconds, model_seconds, remaining_fraction, result_of

_SUSPICIOUS_FRACTION = 0.12
_LONGEST_FRACTION = 0.95
_BUCKETING = 0.35
_FEWEST_LENGTHS = 8
_MOST_MULTIPLE = 64
"""Rows of a product beyond that fill its tiles on every device."""
_ROUNDING = 1e-6
"""A fraction of a length is a mean over batches: 0.75 of 200 may come as 150.00000001."""
_MUCH_LONGER = 1.5
_PACKS = "aten._pack_padded_sequence"


def propose(evidence: Evidence) -> Iterator[TimeModel]:
    """Crop the batch to its longest row, and to its mean length, each rounded up and with its neighbours."""
    padding, model = _padding(evidence), _model(evidence)
    if padding is None or model is None:
        return
    width = padding.shape[1]
    backward = evidence.steps.kind != "inference"
    lengths = {padding.mean_length}
    if padding.longest_fraction < _LONGEST_FRACTION:
        lengths.add(padding.longest_fraction * width)
    multiple = _multiple(width)
    for length in sorted({multiple * max(1, ceil(n / multiple - _ROUNDING)) for n in lengths}):
        if length < width:
            near = (max(1, length - multiple), length, min(width, length + multiple))
            yield TimeModel(
                model=model, variant="cropped", backward=backward, length=width, lengths=tuple(dict.fromkeys(near))
            )


def check(evidence: Evidence) -> Iterator[Finding]:
    """Yield one finding for the most padded tensor."""
    padding = _padding(evidence)
    results = [r for t in propose(evidence) if (r := result_of(evidence, t)) is not None]
    remaining = [remaining_fraction(r) for r in results]
    if padding is None or not remaining:
        return
    busy_s = model_seconds(evidence)
    best = busy_s * (1 - min(remaining))
    least = busy_s * (1 - max(remaining)) if len(remaining) > 1 else 0.7 * best
    # Padding to the batch's longest row is the edit; bucketing reaches some of the way on to the mean length.
    likely = least + _BUCKETING * (best - least)
    yield Finding(
        where=_where(evidence, padding),
        cost_s=best,
        saved_s=(max(0.0, min(least, likely)), max(0.0, likely)),
        because=f"{padding.padding_fraction:.0%} of '{padding.name}' ({'x'.join(map(str, padding.shape))}) is padding; the "
        f"longest row of a batch fills {padding.longest_fraction:.0%} of the width, the mean row {padding.mean_length:.0f} "
        f"positions; cropped, at lengths that change, forward and backward take {min(remaining):.0%} (tried){_first(results)}",
        edit=_edit(padding),
        basis="trial",
    )


def _edit(padding: Padding) -> str:
    multiple = _multiple(padding.shape[1])
    rounded = f", rounded up to a multiple of {multiple} so that few shapes occur" if multiple > 1 else ""
    read = "; where the model reads a row's last position or averages over all, have it do so over the row's own length"
    if padding.longest_fraction >= _LONGEST_FRACTION:
        return (
            f"batch rows of similar length (bucketing), each batch padded to its own longest row{rounded}; or pack rows, or cut "
            f"all to fewer positions{read}"
        )
    return f"pad each batch to its own longest row{rounded}, and batch rows of similar length (bucketing), or pack them{read}"


def _multiple(width: int) -> int:
    """What lengths are rounded up to: a power of two that leaves 8 to 15 lengths, and wastes little of each.

    >>> _multiple(512), _multiple(200), _multiple(16)
    (64, 16, 2)
    """
    return min(_MOST_MULTIPLE, 1 << max(0, (width // _FEWEST_LENGTHS).bit_length() - 1))


def _first(results: list[TrialResult]) -> str:
    """What a length that has not occurred yet costs, once, where that is much."""
    once = [(r.parts["new_length"], r.cured_s or 0.0) for r in results if "new_length" in r.parts]
    new_s, usual_s = max(once, default=(0.0, 0.0))
    return f"; the first batch of a new length takes {milliseconds(new_s)}" if new_s > _MUCH_LONGER * usual_s else ""


def _padding(evidence: Evidence) -> Padding | None:
    if any(o.op == _PACKS for o in evidence.operators):
        return None
    real = [p for p in evidence.paddings if p.signs and p.padding_fraction >= _SUSPICIOUS_FRACTION]
    return max(real, key=lambda p: p.padding_fraction, default=None)


def _model(evidence: Evidence) -> int | None:
    training = [i for i, m in enumerate(evidence.models) if m.is_training or evidence.steps.kind == "inference"]
    return max(training, key=lambda i: evidence.models[i].call_s * evidence.models[i].calls, default=None)


def _where(evidence: Evidence, padding: Padding) -> Source | None:
    """The line that made the padded tensor, as far as it was seen; else the collate function, else the loop over the loader."""
    loaders = sorted(evidence.loaders, key=lambda u: -u.fetches * u.wait_s)
    for source in (padding.source, *(s for u in loaders for s in (u.collate if u.has_own_collate else -1, u.source))):
        line = evidence.source_of(source)
        if line is not None and not line.is_installed:
            return line
    model = _model(evidence)
    return evidence.source_of(evidence.models[model].source) if model is not None else None


RULE = rule(__name__, check, propose=propose, title="Arithmetic on padding")
