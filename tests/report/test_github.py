"""Annotations of GitHub Actions: one line each, whatever the text holds."""

from __future__ import annotations

import re
from urllib.parse import unquote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatout.report.github import Annotation, github_annotations

COMMAND = re.compile(r"::(\w+) ([^:]*)::(.*)")
"""How GitHub's runner takes a line apart: the command, its properties up to the next two colons, the message."""


def read(line: str) -> tuple[str, dict[str, str], str]:
    """What the runner makes of a workflow command."""
    found = COMMAND.fullmatch(line)
    assert found is not None, line
    level, properties, message = found.groups()
    pairs = (pair.split("=", 1) for pair in properties.split(","))
    return level, {name: unquote(value) for name, value in pairs}, unquote(message)


@pytest.mark.parametrize("file", ["train.py", "a,b.py", "C:/x::error::y.py", "100%/net.py"])
def test_a_command_reads_back_as_it_was_meant(file: str) -> None:
    one = Annotation("error", "2.0x slower: 5 % , more", "a::b, 50 %\nsecond line", file, 12)

    [line] = github_annotations([one]).splitlines()

    assert read(line) == (
        "error",
        {"file": file, "line": "12", "title": "2.0x slower: 5 % , more"},
        "a::b, 50 %\nsecond line",
    )


@given(st.text(max_size=60) | st.text(":,%\r\n \x0b\x0c\x1c\x85\u2028=ab", max_size=30))
def test_no_text_begins_another_command(text: str) -> None:
    printed = github_annotations([Annotation("warning", f"t{text}", f"m{text}", f"f{text}", 3)])

    assert printed.endswith("\n")
    [line] = printed[:-1].split("\n")
    assert "\r" not in line
    level, properties, message = read(line)
    assert level == "warning"
    assert set(properties) == {"file", "line", "title"} and properties["line"] == "3"
    assert message.startswith("m")


def test_a_remark_on_no_line_has_a_title_alone() -> None:
    assert github_annotations([Annotation("notice", "slower", "all of it")]) == "::notice title=slower::all of it\n"


def test_of_each_level_the_ten_that_github_shows_are_printed() -> None:
    many = [Annotation("error", f"number {n}", "x") for n in range(12)] + [Annotation("warning", "last", "x")]

    lines = github_annotations(many).splitlines()

    assert len(lines) == 11
    assert "number 9" in lines[-2] and "last" in lines[-1]
