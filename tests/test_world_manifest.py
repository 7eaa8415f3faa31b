"""The manifest of bench/world: whatever it names is there."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

from flatout.core import registry

WORLD = Path(__file__).parents[1] / "bench" / "world"
sys.path.insert(0, str(WORLD))

from scripts import read_manifest  # noqa: E402  # it lies beside the bench, not in the package

SCRIPTS = [s for folder in ("manifest", "device", "held_out") for s in read_manifest(folder=WORLD / folder)]
MAKERS = {
    node.name
    for node in ast.parse((WORLD / "stand_ins.py").read_text()).body
    if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")
}


def test_there_are_many_scripts_of_many_repositories_with_commits_and_licences() -> None:
    assert len(read_manifest()) >= 60
    assert len({s.repository for s in SCRIPTS}) >= 25
    assert all(len(s.commit) == 40 and s.licence for s in SCRIPTS)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda s: s.name)
def test_what_a_script_names_is_there(script) -> None:  # type: ignore[no-untyped-def]
    rules = {rule.id for rule in registry.rules()}

    assert {stand_in["make"] for stand_in in script.stand_ins} <= MAKERS
    for cure in script.cures:
        assert set(cure["rules"]) <= rules, cure["name"]
        assert cure.keys() & {"edits", "apply", "environment"}, cure["name"]
        if "apply" in cure:
            assert (WORLD / "cures" / f"{cure['apply']}.py").is_file()
