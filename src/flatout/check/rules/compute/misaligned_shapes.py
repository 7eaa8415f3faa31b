"""Products in half precision whose sizes are no multiples of what the matrix units load at once.

Costs        The library falls back to kernels with narrow loads or none of the matrix units: a vocabulary of 50257 instead of
             50304, a width of 3620 instead of 3648 (1.1 to 4 times slower on an H200).
Evidence     Sizes of the products that are no multiple of 8 (16 bytes), or large ones no multiple of 64. Trial: the same product
             with the sizes padded, on random data.
Levers       workload.padded-sizes
False alarm  Shapes at which the padded product is no faster: the trial says so. float32, processors.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from flatout.core.parts import rule
from flatout.core.records.evidence import Evidence, Operator
from flatout.core.records.finding import Finding
from flatout.core.records.trial import TimePaddedProduct
from flatout.machine.cost.accounting import around, group_by, remaining_fraction, result_of

_HALF: Final = frozenset({"bfloat16", "float16"})
_PRODUCTS: Final = {"aten.mm": 0, "aten.addmm": 1, "aten.bmm": 0, "aten.baddbmm": 1}
"""Operators and the position of their first factor."""
_ALIGNED: Final = 8
_LARGE: Final = 1024
_ALIGNED_LARGE: Final = 64
_WORTH_A_TRIAL: Final = 0.02
_MOST_TRIALS: Final = 6


class _Suspect(NamedTuple):
    row: int
    trial: TimePaddedProduct
    sizes: tuple[int, ...]
    """The sizes that are not aligned."""


def propose(evidence: Evidence) -> Iterator[TimePaddedProduct]:
    """Time the padded product for the shapes that take longest."""
    seconds: dict[TimePaddedProduct, float] = {}
    for suspect in _suspects(evidence):
        seconds[suspect.trial] = seconds.get(suspect.trial, 0.0) + evidence.operators[suspect.row].op_s
    for trial in sorted(seconds, key=lambda t: -seconds[t])[:_MOST_TRIALS]:
        if seconds[trial] > _WORTH_A_TRIAL * evidence.steps.step_s:
            yield trial


def check(evidence: Evidence) -> Iterator[Finding]:
    """Yield one finding per misaligned size: padding it once mends all products that have it."""
    for sizes, suspects in group_by(_suspects(evidence), lambda s: s.sizes).items():
        priced = [(s, r) for s in suspects if (r := result_of(evidence, s.trial)) is not None]
        if not priced:
            continue
        rows = tuple(s.row for s, _ in priced)
        cost_s = sum(evidence.operators[i].op_s for i in rows)
        saved_s = sum(evidence.operators[s.row].op_s * (1 - remaining_fraction(r)) for s, r in priced)
        if saved_s <= 0:
            continue
        hottest = max(
            priced, key=lambda p: (evidence.operators[p[0].row].phase == "forward", evidence.operators[p[0].row].op_s)
        )
        operator, trial = evidence.operators[hottest[0].row], hottest[0].trial
        padded = ", ".join(f"{n} -> {padded_size(n)}" for n in sizes)
        yield Finding(
            where=evidence.source_of(operator.source),
            cost_s=cost_s,
            saved_s=around(saved_s, 0.15),
            because=f"{len(rows)} products like {trial.rows} x {trial.inner} by {trial.inner} x {trial.columns} in {trial.dtype} "
            f"take {cost_s * 1e3:.2f} ms a step; with {padded} {1 - saved_s / cost_s:.0%} of that (tried)",
            edit=f"make the size a multiple of {_ALIGNED_LARGE} ({padded}): rows of a vocabulary or features that nothing uses",
            module=operator.module,
            operators=rows,
            basis="trial",
        )


def padded_size(size: int) -> int:
    """The next multiple of 64 for a large size, of 8 for a small one."""
    unit = _ALIGNED_LARGE if size >= _LARGE else _ALIGNED
    return -(-size // unit) * unit


def _suspects(evidence: Evidence) -> Iterator[_Suspect]:
    for row, operator in enumerate(evidence.operators if evidence.steps.device_s is not None else ()):
        if operator.bound != "host" and operator.op in _PRODUCTS and (found := _suspect(row, operator)) is not None:
            yield found


def _suspect(row: int, operator: Operator) -> _Suspect | None:
    first = _PRODUCTS[operator.op]
    factors = operator.inputs[first : first + 2]
    if len(factors) < 2 or any(f.dtype not in _HALF for f in factors) or len(factors[0].shape) not in (2, 3):
        return None
    a, b = factors
    batch = a.shape[0] if len(a.shape) == 3 else 1
    rows, inner, columns = a.shape[-2], a.shape[-1], b.shape[-1]
    sizes = tuple(sorted({n for n in (rows, inner, columns) if padded_size(n) != n and n >= _ALIGNED}))
    if not sizes:
        return None
    trial = TimePaddedProduct(
        batch=batch,
        rows=rows,
        inner=inner,
        columns=columns,
        padded=(padded_size(rows), padded_size(inner), padded_size(columns)),
        dtype=a.dtype,
        transposed=(not a.is_contiguous, not b.is_contiguous),
    )
    return _Suspect(row, trial, sizes)


RULE = rule(
    __name__, check, propose=propose, title="Products with sizes that the matrix units dislike", rewrites_line=True
)
