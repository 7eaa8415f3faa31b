"""The files that a report can be written to, as a user asks for them."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.page_reader import Page, check_harmless

pytestmark = pytest.mark.slow

Check = Callable[..., Any]

LOOP = """
    import torch
    from torch import nn
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for i in range(30):
        loss = net(torch.randn(8, 16)).square().mean()  # <b>the forward</b>
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""


@pytest.mark.long
def test_one_run_writes_every_format(check: Check, tmp_path: Path) -> None:
    ran = check(LOOP, "--no-trials", "--html", "r.html", "--markdown", "r.md", "--trace", "r.json.gz")

    assert ran.code == 0, ran.err
    page = Page((tmp_path / "r.html").read_bytes())
    check_harmless(page)
    assert "a training step" in page.text
    assert "<b>the forward</b>" in page.text
    assert "svg" in page.tags
    assert (tmp_path / "r.md").read_text().startswith("### flatout: ")
    names = {e["name"] for e in json.loads(gzip.decompress((tmp_path / "r.json.gz").read_bytes()))["traceEvents"]}
    assert {"forward", "backward", "optimizer", "aten.addmm"} <= names


def test_a_folder_that_does_not_exist_is_refused_before_the_script_runs(check: Check, tmp_path: Path) -> None:
    ran = check("open('ran', 'w')", "--html", "nowhere/r.html")

    assert ran.code == 2
    assert "--html nowhere/r.html: there is no folder" in ran.err
    assert not (tmp_path / "ran").exists()


def test_the_schema_is_printed() -> None:
    code = "import sys; sys.argv = ['flatout', 'schema']; from flatout.app.cli import main; main()"

    printed = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60
    ).stdout

    assert json.loads(printed)["$ref"] == "#/$defs/JsonReport"
