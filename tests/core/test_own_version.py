"""The version is known where the package is installed, and has a name of its own where it is not."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from flatout.core.own_version import NOT_INSTALLED, own_version

SOURCE = Path(__file__).parents[2] / "src"


def test_an_installed_package_says_its_version() -> None:
    assert own_version() == version("flatout")


def test_a_source_tree_says_that_it_is_one(tmp_path: Path) -> None:
    folder = str(SOURCE / "flatout" / "core")
    code = f"import sys; sys.path.insert(0, {folder!r}); import own_version; print(own_version.own_version())"

    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, cwd=tmp_path, check=True
    )

    assert done.stdout.strip() == NOT_INSTALLED
