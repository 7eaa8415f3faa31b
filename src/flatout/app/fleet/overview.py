"""The summary of a store's jobs over a time, as the command line and the served page show it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, NamedTuple

from flatout.blocks.recording.job_store.opening import default_store, open_store, policy_of
from flatout.check.fleet.prices import PriceList
from flatout.check.fleet.summary import summary_of
from flatout.core import units
from flatout.core.errors import UsageError
from flatout.core.records.fleet import FleetJob, FleetSummary
from flatout.core.records.job import JobRecord

_DAY_S: Final = 86400.0
_BEFORE: Final = 3.0
"""How many times as long before the shown time jobs are read, to know what was usual."""
_MANY_WAITING: Final = 2000
_FIELDS: Final[dict[str, Callable[[JobRecord], str]]] = {
    "team": lambda job: job.team,
    "user": lambda job: job.user,
    "project": lambda job: job.project,
    "name": lambda job: job.name,
    "model": lambda job: job.model,
    "node": lambda job: job.node,
    "device": lambda job: job.device,
    "partition": lambda job: job.partition,
}


class TimeSpan(NamedTuple):
    """The time that a summary is about, as Unix times."""

    since_s: float
    until_s: float


class FleetQuery(NamedTuple):
    """A store, which of its jobs, and prices; those that are None are the ones of the store's policy."""

    store: Path
    where: tuple[tuple[str, str], ...] = ()
    gpu_hour: float | None = None
    core_hour: float | None = None


def store_path(option: Path | None) -> Path:
    """The store that an option names, else FLATOUT_STORE, else the user's own."""
    return option or Path(os.environ.get("FLATOUT_STORE") or default_store())


def last_days(days: float, *, now: datetime | None = None) -> TimeSpan:
    """So many days until now."""
    until_s = (now or datetime.now(UTC)).timestamp()
    return TimeSpan(until_s - days * _DAY_S, until_s)


def week_of(text: str) -> TimeSpan:
    """A week of ISO 8601 in UTC.

    Raises UsageError when the text names none.

    >>> week_of("2026-W47").until_s - week_of("2026-W47").since_s
    604800.0
    """
    try:
        begin = datetime.strptime(f"{text}-1", "%G-W%V-%u").replace(tzinfo=UTC)
    except ValueError as e:
        raise UsageError(f"the week '{text}' is none; give one like 2026-W47") from e
    return TimeSpan(begin.timestamp(), begin.timestamp() + 7 * _DAY_S)


def last_week(*, now: datetime | None = None) -> str:
    """The last week of ISO 8601 that is over, in UTC."""
    then = datetime.fromtimestamp((now or datetime.now(UTC)).timestamp() - 7 * _DAY_S, UTC)
    return then.strftime("%G-W%V")


def conditions(where: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """What `--where FIELD=VALUE` asks for. Raises UsageError for something else, and for a field that jobs do not have."""
    found = tuple((key, value) for key, _, value in (text.partition("=") for text in where))
    for (key, value), text in zip(found, where, strict=True):
        if key not in _FIELDS or not value:
            raise UsageError(f"--where {text}: give FIELD=VALUE with one of {', '.join(_FIELDS)}")
    return found


def summarise(query: FleetQuery, window: TimeSpan) -> FleetSummary:
    """The summary of the jobs asked for.

    Raises RecordError when the store cannot be read, UsageError when there is none or its policy is wrong.
    """
    if not query.store.exists():
        raise UsageError(
            f"there is no store '{query.store}'; give one with --store, or watch jobs first: `flatout watch train.py`"
        )
    prices = policy_of(query.store).prices
    found = open_store(query.store).read(
        since_s=window.since_s - _BEFORE * (window.until_s - window.since_s),
    )
    notes = list(found.notes[:5])
    if len(found.notes) > 5:
        notes.append(f"{len(found.notes) - 5} more rows cannot be read")
    if found.num_waiting > _MANY_WAITING:
        waiting = units.counted(found.num_waiting, "ended job")
        notes.append(f"{waiting} lie in files of their own; `flatout fleet tidy` gathers them, and reading gets faster")
    return summary_of(
        [job for job in found.jobs if all(_FIELDS[key](job) == value for key, value in query.where)],
        since_s=window.since_s,
        until_s=window.until_s,
        prices=PriceList(
            gpu_hour=prices.gpu_hour if query.gpu_hour is None else query.gpu_hour,
            core_hour=prices.core_hour if query.core_hour is None else query.core_hour,
            gpus=tuple(prices.gpus.items()) if query.gpu_hour is None else (),
            currency=prices.currency,
        ),
        notes=notes,
    )


def job_named(summary: FleetSummary, name: str) -> FleetJob:
    """The job whose id begins so, the worst for ''. Raises UsageError when none or several do."""
    if not name and summary.jobs:
        return summary.jobs[0]
    found = [job for job in summary.jobs if job.job.startswith(name)]
    if len(found) == 1:
        return found[0]
    if not found:
        raise UsageError(
            f"no job of this time has an id that begins with '{name}'; `flatout fleet` lists them, --days more"
        )
    some = ", ".join(job.job for job in found[:3])
    raise UsageError(f"{len(found)} jobs have an id that begins with '{name}' ({some}); give more of it")
