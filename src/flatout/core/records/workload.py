"""What ran: the command, the versions, the machine's software state, and the settings in force."""

from __future__ import annotations

import re
from typing import Final

from flatout.core.records.record import Record

PACKAGE_FOLDERS: Final = ("site-packages", "dist-packages")
"""Where installers put packages."""
CELL: Final = re.compile(r"cell \d+")
"""The file name of a notebook's cell: code of the third one counts as that of 'train.ipynb/cell 3'."""


def short_place(file: str, line: int) -> str:
    """A line by the name of its file alone, or of its cell.

    >>> short_place("/home/ada/train.py", 12), short_place("/home/ada/train.ipynb/cell 3", 5)
    ('train.py:12', 'cell 3, line 5')
    """
    name = file.replace("\\", "/").rpartition("/")[2]
    return f"{name}, line {line}" if CELL.fullmatch(name) else f"{name}:{line}"


class LibraryFrame(Record, frozen=True, kw_only=True):
    """One line of an installed package that ran below a line of the user's.

    `file` begins at the package ('transformers/trainer.py'); `text` is the stripped line as it stood when the script ran.
    """

    file: str
    line: int
    function: str = ""
    text: str = ""

    @property
    def place(self) -> str:
        """The line as a report names it: 'transformers/trainer.py:2300'."""
        return f"{self.file}:{self.line}"

    @property
    def package(self) -> str:
        """The package, or the module that is a package of one file: 'transformers', 'pytorch_lightning', 'six'."""
        return self.file.partition("/")[0].removesuffix(".py")


class Source(Record, frozen=True, kw_only=True):
    """One line of Python. `file` is absolute; `text` is the stripped line as it stood when the script ran.

    `library` names the innermost line outside torch that ran below this one ('module/file.py:12'), empty when
    the line itself called torch. `via` is the way there: the lines of packages below this one, outermost first, which ends
    with the line of `library`. Of a run of frames in one file the innermost stands for all, and of many files the first and
    the last ones are there; empty in evidence that older versions wrote.
    """

    file: str
    line: int
    function: str = ""
    text: str = ""
    library: str = ""
    via: tuple[LibraryFrame, ...] = ()
    loops: tuple[int, ...] = ()
    """First lines of the loops and comprehensions around this line in its own function, outermost first."""

    @property
    def is_installed(self) -> bool:
        """Whether the line is a package's own, which nobody edits."""
        return any(f"{folder}/" in self.file.replace("\\", "/") for folder in PACKAGE_FOLDERS)


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
