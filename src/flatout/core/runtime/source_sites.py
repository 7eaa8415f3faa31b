"""A running frame is traced back to the user's line of source."""

from __future__ import annotations

import ast
import linecache
import os
import sys
import sysconfig
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from types import CodeType, FrameType
from typing import Final

import msgspec
import torch

from flatout.core.records.workload import PACKAGE_FOLDERS, LibraryFrame, Source
from flatout.core.runtime.live_cells import file_of_cell

_STDLIB: Final = tuple({os.path.realpath(sysconfig.get_paths()[k]) for k in ("stdlib", "platstdlib")})
_TORCH: Final = os.path.realpath(Path(torch.__file__).parent)
_OURS: Final = os.path.realpath(Path(__file__).parents[2])
_GENERATED: Final = os.sep + "torchinductor_"
"""In the path of every file that Inductor generates (torch._inductor.runtime.cache_dir_utils), unless its folder was set."""
_START_UP: Final = ("sitecustomize.py", "usercustomize.py")
"""What Python runs before any script: no part of the user's."""
_USER, _LIBRARY, _INSIDE = 0, 1, 2
_LAST_FILES: Final = 3
"""Files of a library at the end of a chain that are named, besides the outermost: who called what ran is there."""


class Loops:
    """Where the loops of a file begin and end, from its syntax tree."""

    def __init__(self, text: str) -> None:
        self._spans: list[tuple[int, int, int]] = []
        self._functions: list[tuple[int, int]] = []
        try:
            tree = ast.parse(text)
        except (SyntaxError, ValueError):  # a file that changed under the running script, or is none
            return
        self._visit(tree, function=0)

    def around(self, line: int) -> tuple[int, ...]:
        """First lines of the loops around a line within its own function, outermost first."""
        function = max((start for start, end in self._functions if start <= line <= end), default=0)
        return tuple(sorted(start for start, end, own in self._spans if start <= line <= end and own == function))

    def _visit(self, node: ast.AST, *, function: int) -> None:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            function = node.lineno
            self._functions.append((node.lineno, node.end_lineno or node.lineno))
        elif isinstance(
            node, (ast.For, ast.While, ast.AsyncFor, ast.ListComp, ast.GeneratorExp, ast.SetComp, ast.DictComp)
        ):
            self._spans.append((node.lineno, node.end_lineno or node.lineno, function))
        for child in ast.iter_child_nodes(node):
            self._visit(child, function=function)


class Sites:
    """The table of source lines met in one run; a line is known by its index.

    A frame is the user's when its file lies outside torch, flatout, the standard library and the folders where packages
    are installed. `user_root` names a folder that counts as the user's wherever it lies.
    """

    def __init__(self, *, user_root: str | None = None) -> None:
        self._kinds: dict[int, int] = {}
        self._codes: list[CodeType] = []
        """Codes are told apart by `id`, since hashing one walks over its bytecode; held here, so that no id comes twice."""
        self._index: dict[tuple[str, int, str], int] = {}
        self._sources: list[Source] = []
        self._by_position: dict[tuple[int, int, int, int], int] = {}
        self._texts: dict[str, list[str]] = {}
        """The lines of each file as they were when it was met first."""
        self._loops: dict[str, Loops] = {}
        self._num_with_loops = 0
        self._began_s = datetime.now(UTC).timestamp()
        self._user_root = os.path.realpath(user_root) + os.sep if user_root else None

    def of_frame(self, frame: FrameType | None) -> int:
        """Index of the innermost user line at or above `frame`; -1 when there is none."""
        inner: FrameType | None = None
        kinds = self._kinds
        while frame is not None:
            code = frame.f_code
            kind = kinds.get(id(code))
            if kind is None:
                kind = self._new_kind(code)
            if kind == _USER:
                return self._at(frame, inner)
            if kind == _LIBRARY and inner is None:
                inner = frame
            frame = frame.f_back
        return -1

    def chain(self, frame: FrameType | None, *, deepest: int = 8) -> tuple[int, ...]:
        """The user lines at and above `frame`, innermost first, at most `deepest`."""
        found: list[int] = []
        while frame is not None and len(found) < deepest:
            if self.is_user_code(frame.f_code):
                found.append(self._at(frame, None))
            frame = frame.f_back
        return tuple(found)

    def of_code(self, code: CodeType) -> int:
        """Index of the first line of a function."""
        return self._add(code.co_filename, code.co_firstlineno, code.co_qualname, ())

    def is_user_code(self, code: CodeType) -> bool:
        """Whether this code object belongs to the user."""
        kind = self._kinds.get(id(code))
        return (self._new_kind(code) if kind is None else kind) == _USER

    def is_user_file(self, filename: str) -> bool:
        """Whether code of this file belongs to the user."""
        return self._kind(filename) == _USER

    def add(self, source: Source) -> int:
        """Index of a source line met elsewhere (in a worker process)."""
        return self._add(source.file, source.line, source.function, source.via, library=source.library)

    def line_of(self, index: int) -> tuple[str, int]:
        """File and line of a source, the same for all that lies in libraries below it."""
        return (self._sources[index].file, self._sources[index].line) if index >= 0 else ("", 0)

    def table(self) -> tuple[Source, ...]:
        """All lines, in the order of their indices.

        The loops around them are found here: parsing a long file takes a second, and lines are met while the script runs.
        """
        for index in range(self._num_with_loops, len(self._sources)):
            source = self._sources[index]
            loops = self._loops_of(source.file).around(source.line)
            self._sources[index] = msgspec.structs.replace(source, loops=loops)
        self._num_with_loops = len(self._sources)
        return tuple(self._sources)

    def _at(self, frame: FrameType, inner: FrameType | None) -> int:
        code, line, inner_line = frame.f_code, _line_of(frame), _line_of(inner) if inner else 0
        key = (id(code), line, id(inner.f_code) if inner else 0, inner_line)
        found = self._by_position.get(key)
        if found is None:
            via = self._between(frame, inner)
            found = self._by_position[key] = self._add(code.co_filename, line, code.co_qualname, via)
        return found

    def _between(self, frame: FrameType, inner: FrameType | None) -> tuple[LibraryFrame, ...]:
        """The lines of packages from the user's frame down to `inner`, one for each run of frames in one file."""
        inwards: list[FrameType] = []
        while inner is not None and inner is not frame:
            file = inner.f_code.co_filename
            if self._kinds.get(id(inner.f_code)) == _LIBRARY and not (
                inwards and inwards[-1].f_code.co_filename == file
            ):
                inwards.append(inner)
            inner = inner.f_back
        via = tuple(map(_library_frame, reversed(inwards)))
        return via if len(via) <= 1 + _LAST_FILES else (via[0], *via[-_LAST_FILES:])

    def _add(
        self, file: str, line: int, function: str, via: tuple[LibraryFrame, ...], *, library: str | None = None
    ) -> int:
        file = file_of_cell(file) or os.path.abspath(file)
        if library is None:
            library = via[-1].place if via else ""
        key = (file, line, library)
        if key not in self._index:
            self._index[key] = len(self._sources)
            lines = self._texts.setdefault(file, linecache.getlines(file))
            text = lines[line - 1].strip() if 0 < line <= len(lines) else ""
            self._sources.append(Source(file=file, line=line, function=function, text=text, library=library, via=via))
        return self._index[key]

    def _loops_of(self, file: str) -> Loops:
        if file not in self._loops:
            self._loops[file] = Loops("".join(self._texts[file]))
        return self._loops[file]

    def _new_kind(self, code: CodeType) -> int:
        self._codes.append(code)
        kind = self._kinds[id(code)] = self._kind(code.co_filename)
        return kind

    def _kind(self, filename: str) -> int:
        if file_of_cell(filename):
            return _USER
        if filename.startswith("<") or _GENERATED in filename:
            return _INSIDE
        path = os.path.realpath(filename)
        cache = sys.modules.get("torch._inductor.runtime.cache_dir_utils")
        if cache is not None and path.startswith(os.path.realpath(cache.cache_dir()) + os.sep):
            return _INSIDE
        if path.startswith(_OURS + os.sep):  # also where the user's folder is a checkout of flatout
            return _INSIDE
        if self._is_in_user_root(path):
            return _USER
        if path.startswith(_TORCH + os.sep):
            return _INSIDE
        if any(folder in path for folder in PACKAGE_FOLDERS):
            return _LIBRARY
        if os.path.basename(path) in _START_UP or self._is_generated(path):
            return _LIBRARY
        return _INSIDE if path.startswith(_STDLIB) else _USER

    def _is_in_user_root(self, path: str) -> bool:
        """Whether a file lies in the user's folder, and not in an environment in it: torch in a `.venv` is not the user's."""
        root = self._user_root
        if not root or not path.startswith(root) or any(folder in path[len(root) - 1 :] for folder in PACKAGE_FOLDERS):
            return False
        homes = (f"{home}{os.sep}" for home in (_TORCH, *_STDLIB))
        return not any(path.startswith(home) and not root.startswith(home) for home in homes)

    def _is_generated(self, path: str) -> bool:
        """Whether a library wrote this file while the script ran (torch_geometric writes its layers' loops): nobody edits it."""
        if not path.startswith(os.path.realpath(tempfile.gettempdir()) + os.sep):
            return False
        try:
            return os.stat(path).st_mtime > self._began_s
        except OSError:
            return False


def _line_of(frame: FrameType) -> int:
    """The line a frame is on. Instructions without a line (a loop's jump back) count to the line before them."""
    line: int | None = frame.f_lineno
    if line is None:
        before = [n for start, _, n in frame.f_code.co_lines() if n is not None and start <= frame.f_lasti]
        line = before[-1] if before else frame.f_code.co_firstlineno
    return line


def _library_frame(frame: FrameType) -> LibraryFrame:
    code, line = frame.f_code, _line_of(frame)
    text = linecache.getline(code.co_filename, line).strip()
    return LibraryFrame(file=_short(code.co_filename), line=line, function=code.co_qualname, text=text)


def _short(filename: str) -> str:
    """The path from the package folder on."""
    for folder in PACKAGE_FOLDERS:
        _, found, tail = filename.rpartition(folder + os.sep)
        if found:
            return tail
    return filename
