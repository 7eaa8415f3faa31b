"""What a site decides about its fleet: what records leave out, how long they stay, what an hour costs, who is in which team."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import msgspec

from flatout.core.errors import RecordError, UsageError
from flatout.core.files import read_regular_file
from flatout.core.records.job import JobFinding, JobRecord
from flatout.core.records.record import Record, parse_toml
from flatout.core.secrets import HIDDEN, redacted_text

_PATH: Final = re.compile(r"(?<![\w.])(?:~|/|\.{1,2}/|[A-Za-z]:\\)[^\s'\":;,)<>]*[/\\]")
"""The folders of a path in a text."""


class Redact(Record, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is left out of records, besides credentials, which always are."""

    arguments: bool = False
    """All of commands but the script."""
    paths: bool = False
    """Folders in commands, errors and causes; the files' names stay."""
    users: bool = False
    code: bool = False
    """What is quoted from source: the edits, and what causes say."""
    errors: bool = False
    """What an error says; its type stays."""


class Watching(Record, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How jobs are watched: the share of a job's time that it may take, and how often the record is written anew."""

    cost_fraction: float = 0.01
    heartbeat_s: float = 60.0
    looks: bool = True
    """Whether steps are looked into for causes; else time, utilisation and health alone are recorded."""


class Retention(Record, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How many days a record stays after it was last written; None: for ever."""

    days: float | None = None


class Prices(Record, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an hour of a GPU and of a core costs; by device name where `gpus` has it. None: no money is shown."""

    gpu_hour: float | None = None
    core_hour: float | None = None
    gpus: dict[str, float] = {}
    currency: str = "$"


class FleetPolicy(Record, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of `fleet.toml`. `teams` are names of users by team; Slurm's account is the team of all others."""

    redact: Redact = Redact()
    watch: Watching = Watching()
    retention: Retention = Retention()
    prices: Prices = Prices()
    teams: dict[str, tuple[str, ...]] = {}

    def team_of(self, user: str) -> str:
        """The team that lists a user, '' where none does."""
        return next((team for team, users in self.teams.items() if user in users), "")


def read_policy(path: Path) -> FleetPolicy:
    """The policy in a TOML file, the usual one where there is none.

    Raises UsageError when it cannot be read or has a value that makes no sense.
    """
    try:
        policy = msgspec.convert(parse_toml(read_regular_file(path)), FleetPolicy)
    except FileNotFoundError:
        return FleetPolicy()
    except (OSError, RecordError, msgspec.ValidationError) as e:
        raise UsageError(f"the policy '{path}' cannot be used: {e}") from e
    limits = (
        (
            "watch.cost_fraction",
            policy.watch.cost_fraction,
            0.0 < policy.watch.cost_fraction <= 0.5,
            "above 0, up to 0.5",
        ),
        ("watch.heartbeat_s", policy.watch.heartbeat_s, policy.watch.heartbeat_s >= 1.0, "at least 1"),
        ("retention.days", policy.retention.days, (policy.retention.days or 1.0) > 0.0, "above 0"),
    )
    for name, value, is_right, rule in limits:
        if not is_right:
            raise UsageError(f"the policy '{path}': {name} = {value} must be {rule}")
    return policy


def redacted(record: JobRecord, redact: Redact) -> JobRecord:
    """The record without what the policy leaves out, and without what looks like a credential.

    `command` has to be without credentials already, as `redacted_arguments` makes it: only whole arguments tell what is a value.
    """
    script, _, arguments = record.command.partition(" ")
    command = f"{script} {HIDDEN}" if redact.arguments and arguments else record.command
    error = redacted_text(record.error)
    if redact.errors:
        error = error.partition(":")[0] if re.match(r"[\w.]+(:|$)", error) else bool(error) * HIDDEN
    if redact.paths:
        command, error = without_folders(command), without_folders(error)
    return msgspec.structs.replace(
        record,
        command=command,
        error=error,
        user="" if redact.users else record.user,
        findings=tuple(_redacted_finding(finding, redact) for finding in record.findings),
    )


def without_folders(text: str) -> str:
    """A text whose paths are names of files alone.

    >>> without_folders("train.py --data /scratch/ada/set.bin: No such file '/home/ada/x y'")
    "train.py --data set.bin: No such file 'x y'"
    """
    return _PATH.sub("", text)


def _redacted_finding(finding: JobFinding, redact: Redact) -> JobFinding:
    because, edit = redacted_text(finding.because), redacted_text(finding.edit)
    if redact.code:
        because = edit = HIDDEN
    file = finding.file
    if redact.paths:
        file, because, edit = Path(file).name, without_folders(because), without_folders(edit)
    return msgspec.structs.replace(finding, because=because, edit=edit, file=file)
