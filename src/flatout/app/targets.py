"""What a verb runs: a script or a module with its arguments, as it would be given to python."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Final, Literal, NamedTuple

from flatout.core.errors import UsageError

_NOTEBOOK: Final = ".ipynb"
"""The suffix of notebooks, as in core/runtime/notebook.py, which is not imported: `flatout run` is to start fast."""


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

        Raises UsageError where there is no such script or it is a notebook, ScriptError where there is no such module.
        """
        if not self.is_module:
            require_file(Path(self.name), what="the script that you would give to python")
            self.refuse_notebook()
            return Path(self.name)
        from flatout.core.runtime.script import module_file

        file, here = module_file(self.name), Path.cwd()
        return file.relative_to(here) if file.is_relative_to(here) else file

    def refuse_notebook(self) -> None:
        """Raises UsageError where the script is a notebook, whose text no lever could change."""
        if not self.is_module and self.name.endswith(_NOTEBOOK):
            script = shlex.quote(f"{self.name.removesuffix(_NOTEBOOK)}.py")
            raise UsageError(
                f"'{self.name}' is a notebook, which `flatout check` alone runs; save its code as a script "
                f"(`jupyter nbconvert --to script`), and give {script}"
            )

    def typed(self, command: str) -> str:
        """The command line of a verb for this target: `flatout run --plan plan.toml train.py -- --epochs 3`."""
        own = f" -- {shlex.join(self.arguments)}" if self.arguments else ""
        return f"{command} {'-m ' if self.is_module else ''}{shlex.quote(self.name)}{own}"


def require_file(path: Path, *, what: str) -> None:
    """Raises UsageError when there is no such file; `what` is to be given."""
    if not path.is_file():
        raise UsageError(f"'{path}' is not a file; give {what}")
