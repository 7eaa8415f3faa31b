"""Edited texts from earlier runs: a run with a plan does not import the parser for an edit that was made before."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Final

from flatout.core.errors import NativeError, RecordError
from flatout.core.files import write_whole_file
from flatout.core.records.lever import Parameters
from flatout.core.runtime.cache_folder import create_code_folder, default_cache_folder, require_trusted

_MOST: Final = 500
"""Texts in the cache; beyond, the oldest go."""
_CODE: Final = Path(__file__).parents[1]
"""The folder with all code that edits are made by."""


def edited_text(lever: str, text: str, parameters: Parameters, edit: Callable[[str, Parameters], str]) -> str:
    """`edit(text, parameters)`, made once for this text, these parameters, this environment and this code of flatout.

    Nothing is kept where the user's cache folder cannot be written, or is open to others. Raises what `edit` raises.
    """
    folder = default_cache_folder() / "texts"
    words = json.dumps([lever, sorted(parameters.items()), sys.prefix, sys.version, _state_of_code(), text])
    path = folder / f"{hashlib.sha256(words.encode()).hexdigest()}.py"
    with suppress(NativeError, OSError, UnicodeDecodeError):
        require_trusted(folder)
        require_trusted(path)
        return path.read_text(encoding="utf-8")
    changed = edit(text, parameters)
    with suppress(NativeError, RecordError, OSError):
        create_code_folder(folder)
        _make_room(folder)
        write_whole_file(path, changed.encode())
    return changed


@cache
def _state_of_code() -> list[int]:
    """How many files of code there are, and when the last one was changed: an edit by other code is made anew."""
    changed = list(_when_changed(str(_CODE)))
    return [len(changed), max(changed)]


def _when_changed(folder: str) -> Iterator[int]:
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir():
                yield from _when_changed(entry.path)
            elif entry.name.endswith(".py"):
                yield entry.stat().st_mtime_ns


def _make_room(folder: Path) -> None:
    texts = sorted(folder.glob("*.py"), key=lambda path: path.stat().st_mtime)
    for path in texts[: max(0, len(texts) + 1 - _MOST)]:
        path.unlink(missing_ok=True)
