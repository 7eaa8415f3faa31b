"""Values of options that verbs share, on the command line and in Python: read from text, and checked before anything is run."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

from flatout.app.outputs import why_not_writable
from flatout.core.errors import UsageError

if TYPE_CHECKING:
    from flatout.core.records.verdict import Guarantee

Name = TypeVar("Name", bound=str)

ALLOWED_GUARANTEES: Final[tuple[Guarantee, ...]] = ("exact", "bounded", "distribution", "quality")
_TIMES: Final = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}
_SIZES: Final = {
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
}


def one_of(allowed: Sequence[Name], value: str, *, name: str) -> Name:
    """The value of an option that has one of the allowed ones. Raises UsageError for any other; `name` is the option's."""
    if value not in allowed:
        raise UsageError(f"{name} {value} is none of {', '.join(allowed)}")
    return allowed[allowed.index(value)]


def parsed_seconds(text: str, *, name: str) -> float:
    """Seconds of a text such as '5m'. Raises UsageError for anything else, and for what is not above 0; `name` is the option's.

    >>> parsed_seconds("5m", name="--time-budget")
    300.0
    """
    return parsed_amount(text, _TIMES, complaint=f"{name} {text} is no time above 0; write 300, 300s, 5m or 1h")


def parsed_amount(text: str, units: Mapping[str, float], *, complaint: str) -> float:
    """A number above 0 and its unit, times what `units` has for that. Raises UsageError with the complaint for all else."""
    unit = next((u for u in units if u and text.endswith(u)), "")
    try:
        amount = float(text.removesuffix(unit)) * units[unit]
    except (KeyError, ValueError):
        amount = -1.0
    if not 0 < amount < float("inf"):
        raise UsageError(complaint)
    return amount


def parsed_bytes(text: str, *, name: str) -> int:
    """Bytes of a size such as '20GiB'; 0 for an empty text. Raises UsageError for anything else; `name` is the option's.

    >>> parsed_bytes("20GiB", name="--memory-limit") == 20 * 2**30
    True
    """
    if not text:
        return 0
    return int(parsed_amount(text, _SIZES, complaint=f"{name} {text} is no size above 0; write 20GiB, 800MiB or 20GB"))


def require_writable_file(path: Path, *, name: str) -> None:
    """Raises UsageError when a file cannot be written in the end: its folder is missing or not ours; `name` is the option's."""
    if because := why_not_writable(path, Path(os.path.realpath(path))):
        raise UsageError(f"{name} {path}: {because}")
