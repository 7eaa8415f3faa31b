"""Options that several verbs have: one name and one meaning each, and what is checked before anything is run in vain."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from flatout.app.option_values import require_writable_file
from flatout.app.targets import ScriptTarget
from flatout.core.errors import UsageError
from flatout.core.files import STANDARD_OUTPUT, is_stream

Script = Annotated[str | None, typer.Argument(metavar="SCRIPT", help="The script, as you would give it to python.")]
Arguments = Annotated[list[str] | None, typer.Argument(metavar="[ARGS]...", help="The script's own arguments.")]
ModuleName = Annotated[str | None, typer.Option("-m", metavar="MODULE", help="Run a module, like `python -m`.")]
EvidenceJson = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Write Evidence and findings to this file.")
]
ReportHtml = Annotated[
    Path | None, typer.Option("--html", metavar="FILE", help="Write the report as one HTML page to this file.")
]
ReportMarkdown = Annotated[
    Path | None,
    typer.Option("--markdown", metavar="FILE", help="Write a short report for a pull request to this file."),
]
ReportJunit = Annotated[
    Path | None, typer.Option("--junit", metavar="FILE", help="Write what was judged as JUnit XML to this file.")
]
StepTrace = Annotated[
    Path | None, typer.Option("--trace", metavar="FILE", help="Write one step as a trace for Perfetto; .gz packs it.")
]
Allow = Annotated[
    str,
    typer.Option(
        metavar="GUARANTEE",
        help="exact: the same bits. bounded: rounding no worse than before. distribution: other random numbers too. quality: "
        "coarser numbers too, judged by the first losses on three seeds.",
    ),
]


def target_of(script: str | None, module: str | None, arguments: list[str] | None, *, example: str) -> ScriptTarget:
    """What `[-m MODULE] [SCRIPT] [ARGS]...` names. Raises UsageError with the `example` of a call where it names nothing."""
    own = arguments or []
    if module is not None:
        return ScriptTarget(module, True, tuple(([script] if script is not None else []) + own))
    if script is None:
        raise UsageError(f"no script given; call {example}")
    return ScriptTarget(script, False, tuple(own))


def require_writable(**paths: Path | None) -> None:
    """Raises UsageError when a file cannot be written in the end; by the names of the options.

    Its folder has to exist and to be ours to write in, it may be no folder itself, and no other option may name it.
    """
    names: dict[str, str] = {}
    for name, path in paths.items():
        if path is None:
            continue
        target = str(path) if path == STANDARD_OUTPUT or is_stream(path) else os.path.realpath(path)
        require_writable_file(path, name=f"--{name}")
        if (other := names.setdefault(target, name)) != name and target != os.devnull:
            raise UsageError(f"--{name} {path}: --{other} goes there, too; give two paths")


def require_folder_to_write(name: str, path: Path) -> None:
    """Raises UsageError when no folder can be made at a path: it is a file, or lies in no folder; `name` is the option's."""
    if path == STANDARD_OUTPUT:
        raise UsageError(f"{name} {path}: a folder does not go to standard output; give a path")
    if path.exists() and not path.is_dir():
        raise UsageError(f"{name} {path} is a file; give a folder")
    if not path.absolute().parent.is_dir():
        raise UsageError(
            f"{name} {path}: there is no folder '{path.absolute().parent}'; give a path in one that exists"
        )
