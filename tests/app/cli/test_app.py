"""The verbs are found in their folder, in one order, without importing what a start should not pay for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.command_line import flatout
from typer.main import get_command

from flatout.app.cli import app as app_module
from flatout.app.cli.app import app, commands
from flatout.app.cli.command import GROUPS
from flatout.core.records.verdict import PRECISIONS


def test_verbs_come_in_the_order_of_the_help_each_with_its_first_line() -> None:
    names = [name for name, _ in commands()]
    files = Path(app_module.__file__).parent.glob("*.py")
    assert sorted(names) == sorted(file.stem for file in files if "\nCOMMAND = " in file.read_text())
    assert names[0] == "check" and len(names) >= 22
    group = get_command(app)
    found = group.commands  # type: ignore[attr-defined]
    assert group.list_commands(None) == names  # type: ignore[attr-defined]
    assert all(command.get_short_help_str() for command in found.values())


def test_no_two_verbs_claim_one_place() -> None:
    orders = [command.order for _, command in commands()]
    assert len(set(orders)) == len(orders)


def test_the_command_line_starts_without_torch_rich_and_records() -> None:
    program = (
        "import sys, flatout.app.cli.app; "
        "print(*(m for m in ('torch', 'numpy', 'rich', 'msgspec', 'flatout.core.records') if m in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_verify_names_every_precision_in_its_help() -> None:
    command = get_command(app).commands["verify"]  # type: ignore[attr-defined]
    text = next(p.help for p in command.params if p.name == "at")
    assert all(precision in text for precision in PRECISIONS)


def test_the_help_has_all_headings_in_order() -> None:
    text = flatout("-h").out
    places = [text.index(heading) for heading in GROUPS.values()]
    assert places == sorted(places)


def test_the_version_names_torch_and_the_device() -> None:
    ended = flatout("--version")
    assert ended.code == 0
    assert ended.out.startswith("flatout ")
    assert f"torch {torch.__version__}" in ended.out


def test_a_rule_and_a_lever_are_shown_by_a_part_of_their_names() -> None:
    rule = flatout("rules", "growing-cat").out
    assert "bandwidth.growing-cat" in rule
    assert "Costs" in rule and "Evidence" in rule
    lever = flatout("levers", "fused-optimizer").out
    assert lever.splitlines()[1] == "parallelism.fused-optimizer"
    assert "overhead.per-parameter-optimizer" in lever.splitlines()[-1]


@pytest.mark.parametrize(
    ("verb", "name", "words"),
    [
        ("levers", "fused", "several levers are named 'fused'; did you mean"),
        ("levers", "parallelism.fuzed-optimizer", "did you mean parallelism.fused-optimizer"),
        ("rules", "zzzzzz", "no rules are named 'zzzzzz'; `flatout rules` lists all"),
    ],
)
def test_a_name_that_is_not_there_gets_the_nearest(verb: str, name: str, words: str) -> None:
    ended = flatout(verb, name)
    assert ended.code == 2
    assert words in ended.err
