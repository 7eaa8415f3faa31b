"""Where a project's table `[tool.flatout]` is. It imports little: `flatout run`, which is to begin at once, looks for it, too."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from flatout.core.errors import UsageError

_FILE: Final = "pyproject.toml"


def project_table(folder: Path) -> tuple[Path | None, dict[str, object]]:
    """The nearest pyproject.toml at or above a folder that has the table `[tool.flatout]`, and the table.

    Raises UsageError for one that names flatout and is no TOML.
    """
    for above in (folder, *folder.parents):
        file = above / _FILE
        try:
            text = file.read_bytes()
        except OSError:
            continue
        if b"flatout" not in text:
            continue  # tomllib is imported, and a broken file complained of, only where it is ours
        import tomllib

        try:
            table = tomllib.loads(text.decode()).get("tool", {}).get("flatout")
        except (tomllib.TOMLDecodeError, UnicodeDecodeError, AttributeError) as e:
            raise UsageError(f"'{file}' is no TOML ({e}); mend it, or call `flatout --isolated ...`") from e
        if isinstance(table, dict):
            return file, table
        if table is not None:
            raise UsageError(
                f"'{file}': tool.flatout = {table!r} is no table; write [tool.flatout] and options below it"
            )
    return None, {}
