"""Has every Python whose PYTHONPATH names this folder watch its training job, where FLATOUT_WATCH is set.

Python imports a module of this name when it starts. Another one of this name that would have been imported is run, too.
"""

import os
import sys


def _run_other(here: str) -> None:
    """Import the `sitecustomize` that this one stands before, as Python would have."""
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec

    spec = PathFinder.find_spec("sitecustomize", [p for p in sys.path if os.path.realpath(p or ".") != here])
    if spec is not None and spec.loader is not None:
        module = module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


def _watch(here: str) -> None:
    """Watch the job of this process; where its environment has no flatout, with the one that this file belongs to."""
    from importlib.util import find_spec

    if find_spec("flatout") is None:
        sys.path.append(os.path.abspath(os.path.join(here, *[os.pardir] * 4)))
    from flatout.app.fleet.hook import await_training

    await_training(os.environ)


_here = os.path.dirname(os.path.realpath(__file__))
if os.environ.get("FLATOUT_WATCH", "0") not in ("", "0"):  # else nothing of flatout is imported
    try:
        _watch(_here)
    except Exception as e:  # noqa: BLE001  # no job fails because it is not watched
        sys.stderr.write(f"flatout: this job is not watched: {type(e).__name__}: {e}\n")
_run_other(_here)
