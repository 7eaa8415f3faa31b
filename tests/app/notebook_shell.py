"""A stand-in for IPython's shell: names the code of cells as IPython does, and runs cells with their magics."""

from __future__ import annotations

import ast
import linecache
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType
from unittest.mock import patch


class Compiler:
    """IPython.core.compilerop.CachingCompiler, as far as it names code; ipykernel's names are temporary paths like these."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def cache(self, transformed_code: str, number: int = 0) -> str:
        name = f"/tmp/ipykernel_4711/{abs(hash(transformed_code))}.py"
        self._numbers[name] = number
        lines = [f"{line}\n" for line in transformed_code.splitlines()]
        linecache.cache[name] = (len(transformed_code), None, lines, name)
        return name

    def format_code_name(self, name: str) -> tuple[str, str] | None:
        return ("Cell", f"In[{self._numbers[name]}]") if name in self._numbers else None


class Shell:
    """IPython.core.interactiveshell.InteractiveShell, as far as cells are run; `shown` is what it displayed."""

    def __init__(self) -> None:
        self.user_ns: dict[str, object] = {"__name__": "__main__", "get_ipython": lambda: self}
        self.execution_count = 1
        self.compile = Compiler()
        self.shown: list[object] = []
        self.ran: list[str] = []
        self._magics: dict[str, Callable[[str, str], object]] = {}

    def register_magic_function(
        self, func: Callable[[str, str], object], magic_kind: str = "line", magic_name: str | None = None
    ) -> None:
        assert magic_kind == "cell" and magic_name is not None
        self._magics[magic_name] = func

    def run_line_magic(self, magic_name: str, line: str) -> None:
        self.ran.append(f"{magic_name} {line}")
        if magic_name == "load_ext":
            import_module(line).load_ipython_extension(self)

    def transform_cell(self, raw_cell: str) -> str:
        """Blank lines at the beginning go, and magics become calls, as IPython's TransformerManager has it."""
        lines = raw_cell.split("\n")
        while lines and not lines[0].strip():
            del lines[0]
        text = "\n".join(
            f"get_ipython().run_line_magic({line[1:].partition(' ')[0]!r}, {line.partition(' ')[2]!r})"
            if line.startswith("%")
            else line
            for line in lines
        )
        return text if text.endswith("\n") else f"{text}\n"

    def run_cell(self, text: str) -> None:
        """Run a cell as the next one; what it raises passes. The count goes on, as IPython's does."""
        with patch.object(sys, "displayhook", self._display):
            try:
                if text.startswith("%%"):
                    first, _, body = text.partition("\n")
                    name, _, line = first[2:].partition(" ")
                    self._display(self._magics[name](line, body))
                else:
                    code = self.transform_cell(text)
                    tree = ast.parse(code)
                    exec(compile(tree, self.compile.cache(code, self.execution_count), "exec"), self.user_ns)
            finally:
                self.execution_count += 1

    def _display(self, value: object) -> None:
        if value is not None:
            self.shown.append(value)


@contextmanager
def in_notebook() -> Iterator[Shell]:
    """A notebook's shell, which `IPython.get_ipython()` returns meanwhile."""
    assert "IPython" not in sys.modules
    shell, module = Shell(), ModuleType("IPython")
    module.__dict__.update(get_ipython=lambda: shell, version_info=(9, 0, 0, ""))
    sys.modules["IPython"] = module
    try:
        yield shell
    finally:
        del sys.modules["IPython"]
