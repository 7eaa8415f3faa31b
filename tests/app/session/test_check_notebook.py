"""`flatout check train.ipynb`: a notebook's cells as a script, in the reports by their numbers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.command_line import flatout
from tests.core.runtime.test_notebook import written
from tests.page_reader import Page

pytestmark = pytest.mark.slow

Check = Callable[..., Any]

IMPORTS = "%matplotlib inline\nimport torch\nfrom torch import nn"
TRAINING = """\
%%time
torch.manual_seed(0)
net = nn.Linear(16, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
for i in range(40):
    x = torch.stack([torch.full((16,), float(k % 7)) for k in range(64)])
    loss = net(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
display(f"a loss of {loss.ndim} dimensions")
"""


def test_a_notebook_is_checked_and_its_cells_are_named(check: Check, tmp_path: Path) -> None:
    written(tmp_path, IMPORTS, "", TRAINING)

    ran = check(None, "--html", "r.html", "--no-trials", name="train.ipynb")

    assert ran.code == 0, ran.err
    assert "a loss of 0 dimensions" in ran.out
    assert "a training step" in ran.out
    assert "cell 2, line 6" in ran.out
    assert "cell 1, line 1 is no Python and was left out: %matplotlib inline" in " ".join(ran.out.split())
    assert ran.report is not None
    sources = {(s["file"], s["line"], s["text"]) for s in ran.report["evidence"]["sources"]}
    assert (f"{tmp_path}/train.ipynb/cell 2", 10, "optimizer.step()") in sources
    page = Page((tmp_path / "r.html").read_bytes()).text
    assert "cell 2, line 6" in page


@pytest.mark.long
def test_a_notebook_that_fails_names_the_cell(check: Check, tmp_path: Path) -> None:
    written(tmp_path, "x = 1", "\nraise RuntimeError('disk full')")

    ran = check(None, name="train.ipynb")

    assert ran.code == 1
    assert 'train.ipynb/cell 2", line 2, in <module>' in ran.err
    assert "RuntimeError: disk full" in ran.err


@pytest.mark.parametrize(
    "verb", [("tune",), ("verify", "train.py"), ("run", "--plan", "plan.toml"), ("edit", "--plan", "plan.toml")]
)
def test_verbs_that_need_a_script_refuse_a_notebook_and_say_what_to_do(tmp_path: Path, verb: tuple[str, ...]) -> None:
    written(tmp_path, "x = 1")
    (tmp_path / "train.py").write_text("x = 1\n")
    (tmp_path / "plan.toml").write_text("version = 1\n")

    ended = flatout(*verb, "train.ipynb", folder=tmp_path)

    assert ended.code == 2
    assert "'train.ipynb' is a notebook, which `flatout check` alone runs" in " ".join(ended.err.split())
