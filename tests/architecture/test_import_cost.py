"""Importing is cheap and does no work, and the package root offers what it says."""

from __future__ import annotations

import ast
import inspect
import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import flatout

HEAVY = ("torch", "numpy", "triton", "transformers", "lightning", "pytorch_lightning", "accelerate", "sklearn")


def modules_after(code: str) -> set[str]:
    """The names in sys.modules of a fresh interpreter that has run `code`."""
    ended = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport json, sys\nprint(json.dumps(sorted(sys.modules)))"],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == 0, ended.stderr
    return set(json.loads(ended.stdout))


@pytest.mark.slow
@pytest.mark.parametrize(
    "module",
    [
        "flatout",
        "flatout.core.errors",
        "flatout.core.registry",
        "flatout.core.records.evidence",
        "flatout.machine.specs",
        "flatout.machine.cost",
        "flatout.check.traces.ranks",
        "flatout.check.rules",
        "flatout.check.compare",
        "flatout.check.diagnosis",
        "flatout.report",
        "flatout.app.cli",
        "flatout.callbacks",
    ],
)
def test_importing_a_light_module_leaves_the_heavy_ones_out(module: str) -> None:
    loaded = modules_after(f"import {module}")

    assert loaded.isdisjoint(HEAVY)


def test_finding_every_rule_leaves_the_heavy_ones_out() -> None:
    loaded = modules_after("from flatout.core import registry\nassert registry.rules()")

    assert loaded.isdisjoint(HEAVY)


def test_importing_the_root_imports_nothing_else_of_flatout() -> None:
    loaded = modules_after("import flatout")

    assert [name for name in loaded if name.startswith("flatout.")] == []


def test_a_record_from_the_root_does_not_import_torch() -> None:
    loaded = modules_after("from flatout import Diagnosis, Evidence, Finding")

    assert loaded.isdisjoint(HEAVY)


@pytest.mark.parametrize("name", flatout.__all__)
def test_every_public_name_is_at_home_where_the_root_says(name: str) -> None:
    module, attribute = flatout._HOMES[name].split(":")

    value = getattr(flatout, name)

    assert value is (
        import_module(f"flatout.{name}") if name in flatout._VERBS else getattr(import_module(module), attribute)
    )


@pytest.mark.parametrize("name", flatout._VERBS)
def test_a_room_named_after_a_verb_is_called_as_the_verb(name: str) -> None:
    module, attribute = flatout._HOMES[name].split(":")
    verb = getattr(import_module(module), attribute)

    room = getattr(flatout, name)

    assert import_module(f"flatout.{name}") is room
    assert inspect.signature(room) == inspect.signature(verb)
    with pytest.raises(TypeError, match="missing"):
        room()


def test_a_verb_stays_callable_when_its_room_is_imported() -> None:
    loaded = modules_after("import flatout, flatout.check.rules\nassert callable(flatout.check)")

    assert "flatout.check.rules" in loaded


def test_dir_shows_every_public_name() -> None:
    assert set(flatout.__all__) <= set(dir(flatout))


def test_an_unknown_name_is_an_attribute_error_that_lists_the_known_ones() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'chekc'; it offers .*check"):
        flatout.chekc  # noqa: B018


def test_type_checkers_see_the_same_public_names_as_users() -> None:
    tree = ast.parse(Path(flatout.__file__).read_text(encoding="utf-8"))

    typed = {
        alias.name: f"{node.module}:{alias.name}"
        for block in tree.body
        if isinstance(block, ast.If)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }

    assert typed == flatout._HOMES
