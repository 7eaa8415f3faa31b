"""Cells of the notebook that this process runs, if it runs one: their code has temporary file names, reports name the cells."""

from __future__ import annotations

import linecache
import os
import re
import sys
from functools import cache
from typing import Final

_NUMBER: Final = re.compile(r"\d+")


def file_of_cell(filename: str) -> str:
    """The file that the code of a cell counts as, '<this folder>/cell 3', by the file name that its code has; '' for other code.

    IPython knows which of its names belongs to which cell. The lines of the cell can be read from `linecache` by both names.
    """
    ipython = sys.modules.get("IPython")
    get_shell = getattr(ipython, "get_ipython", None)
    shell = get_shell() if get_shell is not None else None
    if shell is None:
        return ""
    label = shell.compile.format_code_name(filename)  # ("Cell", "In[3]")
    found = _NUMBER.search(label[1]) if label is not None else None
    if found is None:
        return ""
    file = os.path.join(_folder(), f"cell {found.group()}")
    entry = linecache.cache.get(filename)
    if entry is not None and linecache.cache.get(file) != entry:
        linecache.cache[file] = entry
    return file


@cache
def _folder() -> str:
    """The folder that the first cell was met in: one cell stays one file where a notebook changes its folder."""
    return os.getcwd()
