"""The plain form of `flatout run`, told from all others."""

from __future__ import annotations

from pathlib import Path

import pytest

from flatout.app.cli.plain_run import planned_words


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("plan.toml", "train.py", "notes.ipynb"):
        (tmp_path / name).write_text("")
    return tmp_path


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("run --plan plan.toml train.py", "script train.py"),
        ("run --plan=plan.toml train.py -- --epochs 3 -- x", "script train.py --epochs 3 -- x"),
        ("run --plan plan.toml -m pkg.train -- --epochs 3", "module pkg.train --epochs 3"),
    ],
)
def test_a_plain_run_begins_at_once(words: str, expected: str, folder: Path) -> None:
    assert planned_words(words.split()) == [str(folder / "plan.toml"), *expected.split()]


@pytest.mark.parametrize(
    "words",
    [
        "",
        "run",
        "run --plan",
        "check train.py",
        "run --plan missing.toml train.py",
        "run --plan plan.toml missing.py",
        "run --plan plan.toml notes.ipynb",
        "run --plan plan.toml train.py --epochs 3",
        "run --plan plan.toml --print train.py",
        "run --plan plan.toml --check-after 9 train.py",
        "run --plan plan.toml -m pkg.train rest",
        "run train.py --plan plan.toml",
        "run -m pkg.train --plan plan.toml",
        "run --help",
    ],
)
def test_any_other_command_line_is_parsed_in_full(words: str) -> None:
    assert planned_words(words.split()) is None
