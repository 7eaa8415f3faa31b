"""The verbs are found in their folder, in one order, without importing what a start should not pay for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from typer.main import get_command

from flatout.app.cli import app as app_module
from flatout.app.cli.app import app, commands
from flatout.core.records.verdict import PRECISIONS


def test_verbs_come_in_the_order_of_the_help_each_with_its_first_line() -> None:
    names = [name for name, _ in commands()]
    files = Path(app_module.__file__).parent.glob("*.py")
    assert sorted(names) == sorted(file.stem for file in files if "\nCOMMAND = " in file.read_text())
    assert names[0] == "check" and len(names) >= 22
    found = get_command(app).commands  # type: ignore[attr-defined]
    assert list(found) == names
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
