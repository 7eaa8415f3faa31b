"""Options that several verbs have: one name and one meaning each, and what is checked before anything is run in vain."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal, NamedTuple, TypeVar

import typer

from flatout.core.errors import UsageError
from flatout.core.files import STANDARD_OUTPUT, is_stream

if TYPE_CHECKING:
    from flatout.core.records.evidence import Evidence
    from flatout.core.records.finding import Diagnosis
    from flatout.core.records.verdict import Guarantee

Name = TypeVar("Name", bound=str)

Script = Annotated[str | None, typer.Argument(metavar="SCRIPT", help="The script, as you would give it to python.")]
Arguments = Annotated[list[str] | None, typer.Argument(metavar="[ARGS]...", help="The script's own arguments.")]
ModuleName = Annotated[str | None, typer.Option("-m", metavar="MODULE", help="Run a module, like `python -m`.")]
IsModule = Annotated[bool, typer.Option("-m", help="SCRIPT is a module, as for `python -m`.")]
EvidenceJson = Annotated[Path | None, typer.Option("--json", help="Write Evidence and findings to this file.")]
ReportHtml = Annotated[Path | None, typer.Option("--html", help="Write the report as one HTML page to this file.")]
ReportMarkdown = Annotated[
    Path | None, typer.Option("--markdown", help="Write a short report for a pull request to this file.")
]
ReportJunit = Annotated[
    Path | None, typer.Option("--junit", metavar="FILE", help="Write what was judged as JUnit XML to this file.")
]
StepTrace = Annotated[
    Path | None, typer.Option("--trace", help="Write one step as a trace for Perfetto; .gz packs it.")
]
Allow = Annotated[
    str,
    typer.Option(
        metavar="GUARANTEE",
        help="exact: the same bits. bounded: rounding no worse than before. distribution: other random numbers too.",
    ),
]

ALLOWED_GUARANTEES: Final[tuple[Guarantee, ...]] = ("exact", "bounded", "distribution")
_TIMES: Final = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}


def script_arguments(arguments: list[str] | None) -> tuple[str, ...]:
    """The script's own arguments, without the `--` that may stand before them.

    >>> script_arguments(["--", "--epochs", "3"])
    ('--epochs', '3')
    """
    own = tuple(arguments or ())
    return own[1:] if own[:1] == ("--",) else own


class ScriptTarget(NamedTuple):
    """What is to be run: a script's path or a module's name, and its arguments."""

    name: str
    is_module: bool
    arguments: tuple[str, ...]

    @property
    def kind(self) -> Literal["script", "module"]:
        """The word that processes of their own get for it."""
        return "module" if self.is_module else "script"

    @property
    def file(self) -> Path:
        """The file that runs, relative to this folder where it lies in it.

        Raises UsageError where there is no such script, ScriptError where there is no such module.
        """
        if not self.is_module:
            require_file(Path(self.name), what="the script that you would give to python")
            return Path(self.name)
        from flatout.core.runtime.script import module_file

        file, here = module_file(self.name), Path.cwd()
        return file.relative_to(here) if file.is_relative_to(here) else file

    def typed(self, command: str) -> str:
        """The command line of a verb for this target: `flatout run --plan plan.toml train.py -- --epochs 3`."""
        own = f" -- {shlex.join(self.arguments)}" if self.arguments else ""
        return f"{command} {'-m ' if self.is_module else ''}{shlex.quote(self.name)}{own}"


def target_of(script: str | None, module: str | None, arguments: list[str] | None, *, example: str) -> ScriptTarget:
    """What `[-m MODULE] [SCRIPT] [ARGS]...` names. Raises UsageError with the `example` of a call where it names nothing."""
    own = list(arguments or [])
    if module is not None:
        return ScriptTarget(module, True, script_arguments(([script] if script is not None else []) + own))
    if script is None:
        raise UsageError(f"no script given; call {example}")
    return ScriptTarget(script, False, script_arguments(own))


def require_file(path: Path, *, what: str) -> None:
    """Raises UsageError when there is no such file; `what` is to be given."""
    if not path.is_file():
        raise UsageError(f"'{path}' is not a file; give {what}")


def require_writable(**paths: Path | None) -> None:
    """Raises UsageError when a file cannot be written in the end; by the names of the options.

    Its folder has to exist and to be ours to write in, it may be no folder itself, and no other option may name it.
    """
    names: dict[str, str] = {}
    for name, path in paths.items():
        if path is None:
            continue
        target = str(path) if path == STANDARD_OUTPUT or is_stream(path) else os.path.realpath(path)
        if because := _why_not_writable(path, Path(target)):
            raise UsageError(f"--{name} {path}: {because}")
        if (other := names.setdefault(target, name)) != name and target != os.devnull:
            raise UsageError(f"--{name} {path}: --{other} goes there, too; give two paths")


def require_folder_to_write(name: str, path: Path) -> None:
    """Raises UsageError when no folder can be made at a path: it is a file, or lies in no folder; `name` is the option's."""
    if path.exists() and not path.is_dir():
        raise UsageError(f"{name} {path} is a file; give a folder")
    if not path.absolute().parent.is_dir():
        raise UsageError(
            f"{name} {path}: there is no folder '{path.absolute().parent}'; give a path in one that exists"
        )


def _why_not_writable(path: Path, target: Path) -> str:
    """Why nothing can be written to a path that leads to this target; '' where it can."""
    if path == STANDARD_OUTPUT:
        return ""
    if is_stream(path):
        return "" if os.access(path, os.W_OK) else "it may not be written to; give another path"
    folder = target.parent
    if not folder.is_dir():
        return f"there is no folder '{folder}'; give a path in one that exists"
    if target.is_dir():
        return "it is a folder; give the path of a file in it"
    if not os.access(folder, os.W_OK | os.X_OK):
        return f"the folder '{folder}' may not be written to; give a path in another one"
    return ""


def one_of(allowed: Sequence[Name], value: str, *, name: str) -> Name:
    """The value of an option that has one of the allowed ones. Raises UsageError for any other; `name` is the option's."""
    if value not in allowed:
        raise UsageError(f"{name} {value} is none of {', '.join(allowed)}")
    return allowed[allowed.index(value)]


def parsed_seconds(text: str, *, name: str) -> float:
    """Seconds of a text such as '5m'. Raises UsageError for anything else, and for what is not above 0; `name` is the option's.

    >>> parsed_seconds("5m", name="--time-budget")
    300.0
    """
    return parsed_amount(text, _TIMES, complaint=f"{name} {text} is no time above 0; write 300, 300s, 5m or 1h")


def parsed_amount(text: str, units: Mapping[str, float], *, complaint: str) -> float:
    """A number above 0 and its unit, times what `units` has for that. Raises UsageError with the complaint for all else."""
    unit = next((u for u in units if u and text.endswith(u)), "")
    try:
        amount = float(text.removesuffix(unit)) * units[unit]
    except (KeyError, ValueError):
        amount = -1.0
    if not 0 < amount < float("inf"):
        raise UsageError(complaint)
    return amount


class Outputs(NamedTuple):
    """What to write where; None leaves it out, `-` is standard output."""

    json: Path | None = None
    html: Path | None = None
    markdown: Path | None = None
    trace: Path | None = None

    @property
    def take_stdout(self) -> bool:
        """Whether a file goes to standard output, so that all else has to go to standard error."""
        return STANDARD_OUTPUT in self

    def write(self, evidence: Evidence, diagnosis: Diagnosis) -> None:
        """Write every file that was asked for, each whole or not at all.

        Raises RecordError when some could not be written, after all others were.
        """
        from flatout.core.files import write_all_files

        def json() -> bytes:
            from flatout.report.json_report import json_report

            return json_report(evidence, diagnosis)

        def html() -> bytes:
            from flatout.report.html import html_report

            return html_report(evidence, diagnosis)

        def markdown() -> bytes:
            from flatout.report.markdown import markdown_report
            from flatout.report.parts.diagnosis import short_diagnosis_blocks

            return markdown_report(short_diagnosis_blocks(evidence, diagnosis)).encode()

        def trace() -> bytes:
            from flatout.report.perfetto import chrome_trace

            return chrome_trace(evidence, compress=self.trace is not None and self.trace.suffix == ".gz")

        contents = zip(self, (json, html, markdown, trace), strict=True)
        write_all_files((path, content) for path, content in contents if path is not None)
