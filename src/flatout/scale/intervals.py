"""How wide a prediction's interval is: as wide as predictions were off where nothing had been fitted, by device and software."""

from __future__ import annotations

import tomllib
from functools import cache
from importlib import resources
from pathlib import PurePath
from typing import Final, NamedTuple

from flatout.core.records.scale import Cluster, ModelShape

_UNKNOWN: Final = 0.4
"""Where no prediction was ever compared with a measurement of such a device: published planners err by 4 to 15 % where they were
fitted, and by 10 to 40 % where they were not (bench/planner.py)."""


class ErrorInterval(NamedTuple):
    """A measured step is between `low` less and `high` more than the predicted speed says, in nine of ten cases; and why."""

    low: float
    high: float
    text: str


class _Errors(NamedTuple):
    """Of a kind of model ('dense' or 'experts') with some software on a device: how far predictions were off, and in how many
    rows.
    """

    device: str
    software: str
    kind: str
    rows: int
    low: float
    high: float


@cache
def _errors() -> tuple[_Errors, ...]:
    text = (resources.files("flatout.scale") / "errors.toml").read_text(encoding="utf-8")
    return tuple(_Errors(**row) for row in tomllib.loads(text)["errors"])


def interval_of(model: ModelShape, cluster: Cluster, preset: str = "") -> ErrorInterval:
    """The interval for a model, a device and software: of the same device, software and kind where these were compared, else of
    what is nearest, wider.
    """
    kind = "experts" if model.num_experts > 1 else "dense"
    rows, device = [row for row in _errors() if row.kind == kind], PurePath(cluster.device).stem
    same = [row for row in rows if row.device == device and row.software == preset]
    if same:
        one = same[0]
        text = f"interval: as far as {one.rows} published steps were off; shares were set with most such steps in sight"
        return ErrorInterval(one.low, one.high, text)
    alike = [row for row in rows if row.device == device or (preset and row.software == preset)]
    if alike:
        low, high = max(row.low for row in alike), max(row.high for row in alike)
        what = ", ".join(sorted({f"{row.software} on {row.device}" for row in alike}))
        text = f"interval: 1.3 times as wide as errors of {what}; this pair was never compared"
        return ErrorInterval(min(0.9, 1.3 * low), 1.3 * high, text)
    return ErrorInterval(
        _UNKNOWN,
        2 * _UNKNOWN,
        f"interval: no step of a model of this kind on {device} was ever compared; a guess",
    )
