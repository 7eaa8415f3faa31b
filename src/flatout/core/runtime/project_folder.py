"""The project that a script belongs to: changes of text reach its files, and no others."""

from __future__ import annotations

from pathlib import Path
from typing import Final

MARKERS: Final = (".git", ".hg", "pyproject.toml", "setup.py", "setup.cfg")
"""What a project's top folder has one of."""


def project_folder(folder: Path) -> Path:
    """The nearest folder, from this one upwards, that has a marker of a project; the folder itself where there is none.

    A home folder is no project, whatever lies in it.
    """
    for above in (folder, *folder.parents):
        if above == Path.home() or above == Path(above.anchor):
            break
        if any((above / marker).exists() for marker in MARKERS):
            return above
    return folder


def is_editable(path: Path, folder: Path, *, is_installed: bool = False) -> bool:
    """Whether a file may be changed for a script in this folder: it lies in there, or elsewhere in its project."""
    return path.is_relative_to(folder) or (path.is_relative_to(project_folder(folder)) and not is_installed)
