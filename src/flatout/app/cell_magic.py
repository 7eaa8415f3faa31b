"""`%%flatout`: a notebook's cell, run under the observation of `flatout check`, whose report is the cell's result.

Nothing here imports IPython: `%load_ext flatout` hands over the shell that runs.
"""

from __future__ import annotations

import ast
import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType
from typing import Final, NamedTuple, Protocol

from flatout.app.observation import measured_machine
from flatout.app.session import Checked, diagnose_all, propose_trials
from flatout.check.capture import FEWEST_STEPS, Capture
from flatout.check.observe.steps.schedule import Schedule
from flatout.core.errors import UsageError
from flatout.core.files import write_all_files
from flatout.core.records.evidence import Evidence
from flatout.core.runtime.cache_folder import default_cache_folder
from flatout.core.runtime.script import INTERRUPTED, Enough, end_script

_OPTIONS: Final = ("--steps", "--seconds", "--json", "--html", "--markdown")
_USUAL_S: Final = 30.0


class CellCompiler(Protocol):
    """The part of IPython's compiler that names the code of cells."""

    def cache(self, transformed_code: str, number: int = 0) -> str:
        """The file name that code of the cell with this number has from now on; tracebacks find its lines by it."""

    def format_code_name(self, name: str) -> tuple[str, str] | None:
        """The cell that such a file name stands for, as ('Cell', 'In[3]'); None for any other."""


class InteractiveShell(Protocol):
    """The part of IPython's shell that is used here."""

    user_ns: dict[str, object]
    execution_count: int
    compile: CellCompiler

    def transform_cell(self, raw_cell: str) -> str:
        """The cell as Python, with calls in the place of magics and of lines for a shell."""

    def register_magic_function(
        self, func: Callable[[str, str], object], magic_kind: str = "line", magic_name: str | None = None
    ) -> None:
        """Have a function called for cells that begin with the magic of this name."""


class MagicOptions(NamedTuple):
    """What stands in the line `%%flatout`."""

    num_steps: int | None = None
    observe_s: float = _USUAL_S
    json: Path | None = None
    html: Path | None = None
    markdown: Path | None = None


def load_ipython_extension(shell: InteractiveShell) -> None:
    """Add the cell magic `%%flatout` to a notebook; `%load_ext flatout` calls this."""

    def flatout(line: str, cell: str) -> Checked:
        """Run the cell under the observation of `flatout check`, and show where a step's time goes.

        %%flatout [--steps N] [--seconds S] [--json FILE] [--html FILE] [--markdown FILE]

        The cell runs to its end, or with --steps until so many steps were observed; after --seconds (30) it goes on unobserved.
        """
        return check_cell(shell, cell, parsed_options(line))

    shell.register_magic_function(flatout, magic_kind="cell", magic_name="flatout")


def parsed_options(line: str) -> MagicOptions:
    """The options in the line of a magic.

    >>> parsed_options("--steps 50 --json report.json").num_steps
    50

    Raises:
        UsageError: An option is unknown, has no value, or one that it cannot have.
    """
    words = [part for word in shlex.split(line) for part in _parts_of(word)]
    found: dict[str, str] = {}
    for name, value in zip(words[::2], [*words[1::2], ""], strict=False):
        if name not in _OPTIONS:
            raise UsageError(f"%%flatout has no option {name}; it has {', '.join(_OPTIONS)}")
        if not value:
            raise UsageError(f"%%flatout {name} has no value; write one after it")
        found[name] = value
    steps, seconds = found.get("--steps"), found.get("--seconds", str(_USUAL_S))
    if steps is not None and not (steps.isdecimal() and int(steps) >= FEWEST_STEPS):
        raise UsageError(
            f"--steps {steps} must be a whole number from {FEWEST_STEPS} on: fewer show nothing inside a step"
        )
    return MagicOptions(
        int(steps) if steps is not None else None,
        _seconds(seconds),
        *(Path(found[name]) if name in found else None for name in _OPTIONS[2:]),
    )


def _parts_of(word: str) -> tuple[str, ...]:
    """An option and its value where they are one word, '--json=report.json'; else the word."""
    name, equals, value = word.partition("=")
    return (name, value) if equals and name in _OPTIONS else (word,)


def check_cell(shell: InteractiveShell, cell: str, options: MagicOptions) -> Checked:
    """Run a cell's code in the notebook's names under observation; the report, which the files of the options hold, too.

    What the cell raises passes as it is, once the report of what there was until then is shown.

    Raises:
        SyntaxError: The cell does not compile.
        RecordError: A file could not be written.
    """
    codes = _compiled(shell, cell)
    name = f"cell {shell.execution_count}"

    def publish(evidence: Evidence) -> None:
        if options.num_steps is not None:
            end_script()

    usual = Schedule(observe_s=options.observe_s)
    capture = Capture(
        command=("%%flatout", name),
        cwd=os.getcwd(),
        schedule=usual
        if options.num_steps is None
        else Schedule(observe_s=options.observe_s, max_light=options.num_steps - 1),
        machine=measured_machine(default_cache_folder()),
        propose=propose_trials,
        publish=publish,
    )
    capture.start()
    try:
        for code in codes:
            exec(code, shell.user_ns)
    except Enough:
        return _written(capture.finish(exit="stopped", exit_code=0), options)
    except BaseException as e:
        exit_code = INTERRUPTED if isinstance(e, KeyboardInterrupt) else 1
        checked = _written(capture.finish(exit=repr(e), exit_code=exit_code), options)
        if checked.evidence.steps.num_observed:
            sys.displayhook(checked)
        raise
    return _written(capture.finish(exit="finished", exit_code=0), options)


def _compiled(shell: InteractiveShell, cell: str) -> list[CodeType]:
    """The cell's code, which a line with the magic stands above; its last value is shown where it is one, as without it."""
    num_blank = next((number for number, line in enumerate(cell.split("\n")) if line.strip()), 0)
    text = "\n" * (1 + num_blank) + shell.transform_cell(cell)  # which begins with the first line that is not blank
    file = shell.compile.cache(text, shell.execution_count)
    tree = ast.parse(text, file)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    codes = [compile(tree, file, "exec", dont_inherit=True)]
    if last is not None:
        codes.append(compile(ast.Interactive([last]), file, "single", dont_inherit=True))
    return codes


def _written(evidence: Evidence, options: MagicOptions) -> Checked:
    checked = Checked(evidence=evidence, diagnosis=diagnose_all(evidence))
    wanted = (
        (options.json, checked.record_json),
        (options.html, lambda: checked.html().encode()),
        (options.markdown, lambda: checked.markdown().encode()),
    )
    write_all_files((path, content) for path, content in wanted if path is not None)
    return checked


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise UsageError(f"--seconds {text} must be a number above 0")
    return seconds
