"""Options as earlier versions called them: they still work, with a note of their present names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from flatout.core.errors import UsageError

FORMER_OPTIONS: Final[dict[str, dict[str, str]]] = {
    "tune": {
        "--budget": "--time-budget",
        "--md": "--markdown",
        "--memory": "--memory-limit",
        "--allowed-loss": "--accuracy-loss",
    },
    "edit": {"--into": "--out"},
    "shrink": {"--budget": "--accuracy-loss", "--time": "--time-budget"},
    "scale": {"--node": "--gpus-per-node"},
    "simulate": {"--node": "--gpus-per-node"},
    "calibrate": {"--ranks": "--nproc"},
    "survive": {"--memory": "--memory-folder"},
}
"""For each verb, former names of options and their present ones."""

_MACHINES: Final = (
    "several machines are torchrun's: start `flatout-torchrun --nnodes N --rdzv-backend c10d --rdzv-endpoint HOST:PORT "
    "--rdzv-id NAME --nproc-per-node R SCRIPT` on each"
)
REMOVED_OPTIONS: Final[dict[str, dict[str, str]]] = {
    "survive": dict.fromkeys(("--nodes", "--nnodes", "--node-rank", "--coordinator", "--join"), _MACHINES),
}
"""For each verb, options that are gone, and what to do instead."""


def with_present_options(words: Sequence[str], *, verb: str) -> tuple[list[str], list[str]]:
    """A verb's own words with present names of options, and the notes to print; what stands behind `--` is left as it is.

    Raises UsageError for an option that is gone.

    >>> with_present_options(["tune", "--budget=5m", "train.py"], verb="tune")
    (['tune', '--time-budget=5m', 'train.py'], ['note: --budget is called --time-budget now'])
    """
    present = FORMER_OPTIONS.get(verb, {})
    end = words.index("--") if "--" in words else len(words)
    changed, notes = [], []
    for word in words[:end]:
        name, equals, value = word.partition("=")
        if name in REMOVED_OPTIONS.get(verb, {}):
            raise UsageError(f"{name} is no option of {verb} any more; {REMOVED_OPTIONS[verb][name]}")
        if name in present:
            notes.append(f"note: {name} is called {present[name]} now")
        changed.append(f"{present.get(name, name)}{equals}{value}")
    return [*changed, *words[end:]], notes
