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


_WIDER: Final = 1.3
"""Of an interval where the device was compared, or the software, and never both together."""


class ErrorInterval(NamedTuple):
    """A measured step is between `low` less and `high` more than the predicted speed says, in nine of ten cases; and why."""

    low: float
    high: float
    text: str


class _Errors(NamedTuple):
    """Of a kind of model (see `model_kind`) with some software on a device ('': any): how far predictions were off, in
    how many rows.
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


def model_kind(model: ModelShape) -> str:
    """What models are compared by: 'hybrid' with state-space layers, else 'experts' or 'dense'."""
    if "M" in model.pattern:
        return "hybrid"
    return "experts" if model.num_experts > 1 else "dense"


def interval_of(model: ModelShape, cluster: Cluster, preset: str = "") -> ErrorInterval:
    """The interval for a model, a device and software: of the same device, software and kind where these were compared, else of
    what is nearest, wider.
    """
    kind = model_kind(model)
    rows, device = [row for row in _errors() if row.kind == kind], PurePath(cluster.device).stem
    same = [row for row in rows if row.device == device and row.software == preset]
    if same:
        one = same[0]
        text = f"interval: as far as {one.rows} published steps were off; shares were set with most such steps in sight"
        return ErrorInterval(one.low, one.high, text)
    of_device = next((row for row in rows if (row.device, row.software) == (device, "")), None)
    of_software = next((row for row in rows if (row.device, row.software) == ("", preset)), None) if preset else None
    for alike, what in ((of_device, f"on {device}"), (of_software, f"with {preset}")):
        if alike is not None:
            text = (
                f"interval: {_WIDER} times as wide as errors of {alike.rows} published steps {what}; "
                "this device with this software was never compared"
            )
            return ErrorInterval(min(0.9, _WIDER * alike.low), _WIDER * alike.high, text)
    return ErrorInterval(
        _UNKNOWN,
        2 * _UNKNOWN,
        f"interval: no step of a model of this kind on {device} was ever compared; a guess",
    )
