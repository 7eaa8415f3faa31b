"""How processes come to be watched: variables for a command, a line for a Python environment, a prolog for Slurm."""

from __future__ import annotations

import os
import shlex
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from flatout.core.errors import UsageError

STARTUP: Final = Path(__file__).parent / "startup"
"""The folder with `sitecustomize.py`."""
_NAME: Final = "flatout_watch.pth"
_LINE: Final = (
    "import os; os.environ.get('FLATOUT_WATCH', '0') in ('', '0') or "
    'exec("try:\\n from flatout.app.fleet.hook import await_training\\n await_training(os.environ)\\nexcept Exception: pass")\n'
)


def watched_environment(environment: Mapping[str, str], store: Path) -> dict[str, str]:
    """The variables under which a command's Python processes watch their trainings and append to a store."""
    paths = [str(STARTUP), *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    return {
        **environment,
        "FLATOUT_WATCH": "1",
        "FLATOUT_STORE": str(store.absolute()),
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)),
    }


def hook_path() -> Path:
    """The file by which each Python of this environment looks at FLATOUT_WATCH when it starts."""
    return Path(sysconfig.get_path("purelib")) / _NAME


def install_hook() -> Path:
    """Write that file; where it is. Raises UsageError when the environment's folder may not be written to."""
    path = hook_path()
    try:
        path.write_text(_LINE)
    except OSError as e:
        raise UsageError(f"the hook '{path}' cannot be written: {e.strerror or e}; install it as who owns it") from e
    return path


def remove_hook() -> Path:
    """Remove that file, if it is there; where it was. Raises UsageError when it may not be removed."""
    path = hook_path()
    try:
        path.unlink(missing_ok=True)
    except OSError as e:
        raise UsageError(f"the hook '{path}' cannot be removed: {e.strerror or e}") from e
    return path


def task_prolog(store: Path) -> str:
    """A TaskProlog for Slurm (slurm.conf): what it prints as `export NAME=value` is set in each task."""
    return "\n".join(
        (
            "#!/bin/sh",
            "# Slurm sets in each task what this prints. A task that sets FLATOUT_WATCH=0 itself is not watched.",
            '[ "${FLATOUT_WATCH-}" = 0 ] && exit 0',
            f"echo {shlex.quote(f'export FLATOUT_STORE={store.absolute()}')}",
            "echo export FLATOUT_WATCH=1",
            f'echo "export PYTHONPATH={STARTUP}${{PYTHONPATH:+:$PYTHONPATH}}"',
            "",
        )
    )
