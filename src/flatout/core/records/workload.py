"""What ran: the command, the versions, the machine's software state, and the settings in force."""

from __future__ import annotations

from flatout.core.records.record import Record


class Source(Record, frozen=True, kw_only=True):
    """One line of Python. `file` is absolute; `text` is the stripped line as it stood when the script ran.

    `library` names the innermost line outside torch that ran below this one ('module/file.py:12'), empty when
    the line itself called torch.
    """

    file: str
    line: int
    function: str = ""
    text: str = ""
    library: str = ""
    loops: tuple[int, ...] = ()
    """First lines of the loops and comprehensions around this line in its own function, outermost first."""


class Setting(Record, frozen=True, kw_only=True):
    """A global switch that was in force, and the user's line that set it (None: set elsewhere, or a default)."""

    name: str
    value: str
    source: Source | None = None


class Workload(Record, frozen=True, kw_only=True):
    """The fingerprint of what was observed."""

    command: tuple[str, ...]
    cwd: str
    python: str
    torch: str
    device: str
    """'cpu', or the accelerator's name as torch reports it."""
    num_cores: int
    num_threads: int
    world_size: int = 1
    num_parameters: int = 0
    trained_parameters: int = 0
    settings: tuple[Setting, ...] = ()
