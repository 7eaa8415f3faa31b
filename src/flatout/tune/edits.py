"""A plan as changes of text: what each lever changes in the user's files, in order, and which levers remain in the
plan.
"""

from __future__ import annotations

import io
import tokenize
from collections.abc import Callable
from difflib import unified_diff
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from flatout.core.errors import EditError, PlanError, RecordError
from flatout.core.files import write_whole_file
from flatout.core.records.lever import Lever, Parameters, PlannedLever
from flatout.core.records.plan import Plan
from flatout.core.registry import lever_of
from flatout.core.runtime.project_folder import is_editable, project_folder
from flatout.tune.rewrite.source import changed_places

if TYPE_CHECKING:
    from flatout.tune.verify.side_process import Request

_NO_NEWLINE: Final = "\\ No newline at end of file\n"
"""What `diff` writes and `patch` reads after a last line that has no end."""


class Stayed(NamedTuple):
    """A lever that remains in the plan, because its change cannot be written into the text."""

    planned: PlannedLever
    because: str


class ChangedFile(NamedTuple):
    """A file of the script's project: its name in a diff, its text before and after, and how it is encoded."""

    path: Path
    name: str
    before: str
    after: str
    encoding: str


class Edits(NamedTuple):
    """Changes that a plan makes in the text of a script and in how it is started, and what remains to be done by the plan."""

    plan: Plan
    files: tuple[ChangedFile, ...]
    stayed: tuple[Stayed, ...]
    is_outdated: bool
    """Whether a lever did not find its place: the plan was made for another text."""
    folder: Path
    """What the files' names are relative to: the script's folder, or its project's where a file lies outside of that."""
    environment: dict[str, str]
    """Variables to start the script with: what allocators read when a process begins is no matter of the text."""

    @property
    def rest(self) -> Plan:
        """The plan of the levers that remain, without the measured gain, which is not known of these alone."""
        left = tuple(stayed.planned for stayed in self.stayed)
        return Plan(script=self.plan.script, arguments=self.plan.arguments, proved_on=self.plan.proved_on, lever=left)

    def diff(self) -> str:
        """The unified diff of all files, for `patch -p1` in `folder`."""
        return "".join(_diff(file) for file in self.files)

    def changed(self, run: Request) -> Request:
        """A run of the script with the changed texts, which leaves the files as they are."""
        texts = {str(file.path.resolve()): file.after for file in self.files}
        return msgspec.structs.replace(run, texts=texts, environment=self.environment)

    def write(self, folder: Path | None = None) -> tuple[Path, ...]:
        """Write the changed files in place, or under `folder`, each whole or not at all; returns their paths.

        Raises PlanError when in place and the plan was made for another text; RecordError when a file cannot be written.
        """
        if folder is None and self.is_outdated:
            why = "; ".join(f"{s.planned.id}: {s.because}" for s in self.stayed)
            raise PlanError(
                f"the plan was made for another text of the script ({why}); tune again. Nothing was written"
            )
        targets = tuple(file.path if folder is None else folder / file.name for file in self.files)
        for file, target in zip(self.files, targets, strict=True):
            try:
                target.parent.mkdir(parents=True, exist_ok=True)
                mode = target.stat().st_mode if target.exists() else None
            except OSError as e:
                raise RecordError(
                    f"cannot write '{target}': {e.strerror or e}; give a folder that can be written"
                ) from e
            write_whole_file(target.resolve(), file.after.encode(file.encoding))
            if mode is not None:
                target.chmod(mode)
        return targets


def edits(plan: Plan, script: Path, *, root: Path | None = None) -> Edits:
    """Changes that the plan's levers make in the text of `script` and of the files under `root` (the script's folder if None).

    Those that are nothing but an edit come first, as in a run, where the text is changed before anything runs. Raises PlanError
    when a lever names a file outside of the script's project, RecordError when the script cannot be read.
    """
    texts = _Texts(script, root)
    stayed: list[Stayed] = []
    environment: dict[str, str] = {}
    is_outdated = False
    for planned in sorted(plan.lever, key=lambda p: lever_of(p.id).apply is not None):
        lever = lever_of(planned.id)
        if lever.environment is not None:
            environment |= lever.environment(planned.parameters)
            continue
        try:
            texts.change(lever, planned)
        except EditError as e:
            stayed.append(Stayed(planned, str(e)))
            is_outdated |= lever.apply is None
    order = {id(planned): index for index, planned in enumerate(plan.lever)}
    stayed.sort(key=lambda s: order[id(s.planned)])
    folder, files = texts.changed()
    return Edits(plan, files, tuple(stayed), is_outdated, folder, environment)


class _Texts:
    """The files of a script's project that have been looked at, as they were and as they are now."""

    def __init__(self, script: Path, root: Path | None) -> None:
        self._script = script.absolute()
        self._root = root.absolute() if root is not None else self._script.parent
        self._files: dict[Path, ChangedFile] = {}
        self._read(self._script)

    def change(self, lever: Lever, planned: PlannedLever) -> None:
        """Make a lever's edit; raises EditError when there is none, or it is not certain."""
        if lever.edit is None:
            raise EditError("it has no change of text")
        before = dict(self._files)
        try:
            for parameters in changed_places(planned.parameters):
                self._change(lever.id, lever.edit, parameters)
        except (EditError, PlanError):
            self._files = before  # all of its places, or none
            raise

    def _change(self, lever_id: str, edit: Callable[[str, Parameters], str], parameters: Parameters) -> None:
        name = parameters.get("file")
        path = (self._root / str(name) if name is not None else self._script).resolve()
        root = self._root.resolve()
        if not is_editable(path, root):
            raise PlanError(f"lever '{lever_id}' names '{path}', which is not in the script's project; mend the plan")
        path = self._root / path.relative_to(root) if path.is_relative_to(root) else path
        try:
            file = self._files.get(path) or self._read(path)
        except RecordError as e:
            raise EditError(str(e)) from e
        after = edit(file.after, parameters)
        if after == file.after:
            raise EditError("it changes nothing in the text")
        try:
            compile(after, file.name, "exec", dont_inherit=True)
        except SyntaxError as e:
            raise EditError(f"its change leaves no Python: {e}") from e
        self._files[path] = file._replace(after=after)

    def changed(self) -> tuple[Path, tuple[ChangedFile, ...]]:
        """The files that differ from before, the script first, and the folder that their names are relative to."""
        files = [file for file in self._files.values() if file.after != file.before]
        folder = self._root
        if not all(file.path.is_relative_to(folder) for file in files):
            folder = project_folder(folder.resolve())
            files = [f._replace(name=f.path.resolve().relative_to(folder).as_posix()) for f in files]
        return folder, tuple(files)

    def _read(self, path: Path) -> ChangedFile:
        """Raises RecordError when it cannot be read."""
        try:
            data = path.read_bytes()
            encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
            text = data.decode(encoding)
        except (OSError, SyntaxError, UnicodeDecodeError) as e:
            raise RecordError(f"cannot read '{path}': {e}; give the script that the plan was made for") from e
        name = path.relative_to(self._root).as_posix() if path.is_relative_to(self._root) else path.name
        self._files[path] = file = ChangedFile(path, name, text, text, encoding)
        return file


def _diff(file: ChangedFile) -> str:
    lines = unified_diff(_lines(file.before), _lines(file.after), f"a/{file.name}", f"b/{file.name}", lineterm="\n")
    return "".join(line if line.endswith("\n") else f"{line}\n{_NO_NEWLINE}" for line in lines)


def _lines(text: str) -> list[str]:
    """Lines as `diff` counts them: only a line feed ends one."""
    return io.StringIO(text, newline="\n").readlines()
