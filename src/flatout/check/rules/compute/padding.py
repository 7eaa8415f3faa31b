"""Much of the arithmetic is on padding.

Costs        The share of every product and pointwise operator that works on padded positions.
Evidence     Trailing constants in the batch's tensors, with something that says they are padding (integer tokens, padding_idx,
             a mask, lengths). Trial: the model's forward and backward on the same batch, cropped to its longest row and to its
             mean length.
Levers       communication.trim-padding, communication.bucket-lengths, communication.pack
False alarm  Batches that are packed before the arithmetic (pack_padded_sequence). Images with black borders, tokens that repeat:
             without a sign of padding, or where the model refuses shorter input or gets no faster, nothing is said.
"""

from __future__ import annotations

from collections.abc import Iterator

from flatout.core.parts import rule
from flatout.core.records.evidence import Evidence, Padding
from flatout.core.records.finding import Finding
from flatout.core.records.trial import TimeModel
from flatout.core.records.workload import Source
from flatout.machine.cost.accounting import model_seconds, remaining_fraction, result_of

_SUSPICIOUS_FRACTION = 0.12
_LONGEST_FRACTION = 0.95
_BUCKETING = 0.35
_PACKS = "aten._pack_padded_sequence"


def propose(evidence: Evidence) -> Iterator[TimeModel]:
    """Crop the batch to its longest row, and to its mean length."""
    padding, model = _padding(evidence), _model(evidence)
    if padding is None or model is None:
        return
    width = padding.shape[1]
    backward = evidence.steps.kind != "inference"
    lengths = {max(1, round(padding.mean_length))}
    if padding.longest_fraction < _LONGEST_FRACTION:
        lengths.add(max(1, round(padding.longest_fraction * width)))
    for length in sorted(n for n in lengths if n < width):
        yield TimeModel(model=model, variant="cropped", backward=backward, length=width, cropped_length=length)


def check(evidence: Evidence) -> Iterator[Finding]:
    """Yield one finding for the most padded tensor."""
    padding = _padding(evidence)
    results = (result_of(evidence, t) for t in propose(evidence))
    remaining = [remaining_fraction(r) for r in results if r is not None]
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
        f"positions; cropped, forward and backward take {min(remaining):.0%} (tried)",
        edit="pad each batch to its own longest row, and batch rows of similar length (bucketing), or pack them",
        basis="trial",
    )


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
    for source in (
        padding.source,
        *(s for u in evidence.loaders for s in (u.collate if u.has_own_collate else -1, u.source)),
    ):
        if source >= 0:
            return evidence.source_of(source)
    model = _model(evidence)
    return evidence.source_of(evidence.models[model].source) if model is not None else None


RULE = rule(__name__, check, propose=propose, title="Arithmetic on padding")
