"""Source and edits on the page."""

from __future__ import annotations

import html
import json
import os
import re
from pathlib import Path

import msgspec
import pytest
from markupsafe import Markup

from flatout.core.records.finding import RankedFinding
from flatout.core.records.workload import Source
from flatout.report.html.code import edit, excerpt, highlighted

change = msgspec.structs.replace

SCRIPT = '''\
"""A model."""

class Net:
    def forward(self, x):
        scores = x @ x.T
        weights = scores.softmax(-1)  # <here>
        return weights @ x


net = Net()
'''


def at(finding: RankedFinding, path: Path, *, text: str, line: int = 6) -> RankedFinding:
    return change(finding, file=str(path), line=line, text=text, also=())


def kinds(finding: RankedFinding, text: str, new: str) -> list[tuple[str, str]]:
    return [(c.kind, plain(c.text)) for c in edit(change(finding, text=text, edit=new))]


def plain(markup: str) -> str:
    """What a reader sees of it."""
    return html.unescape(re.sub("<[^>]*>", "", markup)) if isinstance(markup, Markup) else markup


def test_the_lines_around_are_read_while_the_file_still_says_what_ran(finding: RankedFinding, tmp_path: Path) -> None:
    path = tmp_path / "net.py"
    path.write_text(SCRIPT)
    also = Source(file=str(path), line=5, text="scores = x @ x.T")

    lines = excerpt(change(at(finding, path, text="weights = scores.softmax(-1)  # <here>"), also=(also,)))

    assert [(line.number, line.role) for line in lines if line.role] == [(5, "also"), (6, "here")]
    assert [line.number for line in lines] == [3, 4, 5, 6, 7]
    assert "&lt;here&gt;" in lines[3].code
    assert plain(lines[0].code) == "class Net:"
    assert plain(lines[2].code) == "        scores = x @ x.T"


@pytest.mark.parametrize("line", [1, 6, 0, -3, 10**9])
def test_a_file_that_has_changed_gives_only_the_recorded_line(
    finding: RankedFinding, tmp_path: Path, line: int
) -> None:
    path = tmp_path / "net.py"
    path.write_text("# edited since\n" + SCRIPT)

    [shown] = excerpt(at(finding, path, text="weights = scores.softmax(-1)  # <here>", line=line))

    assert plain(shown.code) == "weights = scores.softmax(-1)  # <here>"


def test_what_is_no_readable_source_file_is_left_alone(finding: RankedFinding, tmp_path: Path) -> None:
    pipe, binary, huge = tmp_path / "pipe.py", tmp_path / "binary.py", tmp_path / "huge.py"
    os.mkfifo(pipe)  # reading it would wait for ever
    binary.write_bytes(b"\xff\xfe\x00weights\n" * 10)
    huge.write_text("weights\n" * 200_000)

    for path in (pipe, binary, huge, tmp_path, tmp_path / "gone.py", Path("/dev/zero"), Path("nul\0.py")):
        assert len(excerpt(at(finding, path, text="weights", line=1))) == 1


def test_a_finding_without_a_line_has_no_excerpt(finding: RankedFinding) -> None:
    assert excerpt(change(finding, text="", file="", line=0)) == ()


def test_highlighting_keeps_every_character() -> None:
    text = "x = [i for i in range(3)]  # <b>&amp;'\""

    [line] = highlighted(text)

    assert "<b>" not in line
    assert plain(line) == text


def test_a_keyword_for_the_call_on_the_line_becomes_a_diff(finding: RankedFinding) -> None:
    old = "opt = torch.optim.AdamW(net.parameters(), lr=args.lr)"

    assert kinds(finding, old, "torch.optim.AdamW(..., fused=True)") == [
        ("old", old),
        ("new", "opt = torch.optim.AdamW(net.parameters(), lr=args.lr, fused=True)"),
    ]


def test_code_for_the_same_target_becomes_a_diff(finding: RankedFinding) -> None:
    assert kinds(finding, "y = a @ b @ c", "y = a @ (b @ c)") == [("old", "y = a @ b @ c"), ("new", "y = a @ (b @ c)")]
    assert kinds(finding, "return x", "return x.mT") == [("old", "return x"), ("new", "return x.mT")]


@pytest.mark.parametrize(
    ("text", "new", "shown"),
    [
        ("optimizer.step()", "torch.optim.AdamW(..., fused=True)", ["code"]),
        ("opt = AdamW(p, fused=False)", "torch.optim.AdamW(..., fused=True)", ["code"]),
        ("y = f(x)", "compute it once before the loop", ["text"]),
        ("y = f(x)", "append to a list:\n    ys.append(y)\nand cat once", ["text", "code", "text"]),
        ("y = f(x)", "z = g(x)", ["code"]),
        ("y = f(x)", "", []),
        ("y = f(", "torch.cat", ["text"]),
    ],
)
def test_other_edits_are_prose_and_code(finding: RankedFinding, text: str, new: str, shown: list[str]) -> None:
    assert [kind for kind, _ in kinds(finding, text, new)] == shown


def test_the_lines_around_a_finding_in_a_notebook_are_those_of_its_cell(tmp_path: Path, finding: RankedFinding) -> None:
    cells = [{"cell_type": "code", "source": "import torch"}, {"cell_type": "code", "source": SCRIPT}]
    (tmp_path / "train.ipynb").write_text(json.dumps({"nbformat": 4, "metadata": {}, "cells": cells}))

    lines = excerpt(at(finding, tmp_path / "train.ipynb" / "cell 2", text="weights = scores.softmax(-1)  # <here>"))

    assert [(line.number, line.role) for line in lines if line.role] == [(6, "here")]
    assert "def forward(self, x):" in " ".join(plain(line.code) for line in lines)
