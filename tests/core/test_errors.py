"""Packages of extras: what works without them, and what is said where one is missing."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from flatout.core.errors import EXTRA_OF

ROOT = Path(__file__).parents[2]
WITHOUT = f"import sys\nfor name in {[*EXTRA_OF]!r}: sys.modules[name] = None\n"


def ran(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", WITHOUT + code], check=False, capture_output=True, text=True, timeout=60
    )


def test_every_package_is_in_the_extra_that_is_named() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]

    for module, extra in EXTRA_OF.items():
        assert any(requirement.startswith(module.replace("_", "-")) for requirement in extras[extra]), module


def test_what_is_looked_for_is_listed_without_any_of_them() -> None:
    ended = ran("from flatout.core.registry import rules\nprint(len(rules()))")

    assert ended.returncode == 0, ended.stderr
    assert int(ended.stdout) > 80


def test_levers_without_their_package_say_what_to_install() -> None:
    ended = ran("from flatout.core.registry import levers\nlevers()")

    assert ended.stderr.splitlines()[-1].endswith("libcst is not installed; it comes with: pip install 'flatout[edit]'")


@pytest.mark.slow
def test_a_command_without_its_package_ends_in_one_line() -> None:
    ended = ran("sys.argv = ['flatout', 'levers']\nfrom flatout.app.cli import main\nmain()")

    assert ended.returncode == 2
    assert ended.stderr.strip() == "flatout: libcst is not installed; it comes with: pip install 'flatout[edit]'"
