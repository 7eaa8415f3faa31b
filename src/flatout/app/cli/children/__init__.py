"""The processes that the verbs start; none of them is a command of its own."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flatout.core.runtime.script import Script


def load_target(kind: str, target: str, arguments: Sequence[str]) -> Script:
    """The user's script or module. Raises ScriptError when it cannot be loaded.

    `python -m` has put the folder that we start in on the search path; it leaves, and the script's own goes first later.
    """
    from flatout.core.runtime.script import load_module, load_script

    sys.path[0] = ""
    script = (load_script if kind == "script" else load_module)(target, tuple(arguments))
    sys.path.pop(0)
    return script
