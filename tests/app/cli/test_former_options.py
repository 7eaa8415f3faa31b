"""Options as earlier versions called them."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.command_line import flatout
from typer.main import get_command

from flatout.app.cli.app import app
from flatout.app.cli.former_options import FORMER_OPTIONS, with_present_options


@pytest.mark.parametrize("verb", FORMER_OPTIONS)
def test_former_names_are_no_options_any_more_and_present_ones_are(verb: str) -> None:
    command = get_command(app).commands[verb]  # type: ignore[attr-defined]
    options = {option for parameter in command.params for option in parameter.opts}
    assert set(FORMER_OPTIONS[verb].values()) <= options
    assert not set(FORMER_OPTIONS[verb]) & options


def test_a_former_name_works_with_a_note(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import torch")
    ended = flatout("tune", "--budget", "soon", "train.py", folder=tmp_path)
    assert ended.code == 2
    assert "note: --budget is called --time-budget now" in ended.err
    assert "--time-budget soon is no time above 0" in ended.err


def test_options_of_the_script_and_of_other_verbs_stay() -> None:
    for verb, words in (
        ("tune", ["tune", "train.py", "--", "--budget", "3", "--md"]),
        ("check", ["check", "--budget"]),
    ):
        assert with_present_options(words, verb=verb) == (words, [])


@pytest.mark.slow
@pytest.mark.long
def test_a_former_name_after_the_script_is_the_scripts(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("raise SystemExit(9)")
    ended = flatout("tune", "train.py", "--budget", "3", folder=tmp_path)
    assert "note: --budget comes after train.py and goes to it" in ended.err
    assert "is called" not in ended.err
