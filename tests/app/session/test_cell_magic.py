"""`%%flatout` in a notebook, by a stand-in for IPython's shell: what it runs, shows and names."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.app.notebook_shell import Shell, in_notebook

import flatout
from flatout.app.session import Checked
from flatout.core.errors import UsageError
from flatout.report.json_report import read_evidence

pytestmark = pytest.mark.slow

MODEL = """import torch
from torch import nn

class Rows(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(32, 1)
    def forward(self, x):
        return self.linear(torch.stack([torch.relu(row) for row in x]))
"""
TRAINING = """
torch.manual_seed(0)
net = Rows()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for i in range(num_steps):
    loss = net(torch.randn(64, 32)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
loss.item()
"""


@pytest.fixture
def shell(tmp_path: Path, cache_of_this_process: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shell]:
    """A notebook in which the extension is loaded and the first cell, with the model, has run."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache_of_this_process))
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")
    monkeypatch.chdir(tmp_path)
    with in_notebook() as found:
        flatout.load_ipython_extension(found)
        found.run_cell(MODEL)
        yield found


@pytest.fixture
def untried(monkeypatch: pytest.MonkeyPatch) -> None:
    """No trials, where a test looks at nothing that they measure."""
    monkeypatch.setattr("flatout.app.cell_magic.propose_trials", lambda evidence: ())


@pytest.mark.long
def test_the_cell_runs_as_without_the_magic_and_its_report_is_shown(shell: Shell) -> None:
    shell.run_cell("num_steps = 40")
    shell.run_cell(TRAINING.replace("loss.item()", "expected = loss.item(), torch.rand(1).item()"))

    shell.run_cell(f"%%flatout --seconds 1{TRAINING}torch.rand(1).item()")

    value, drawn, checked = shell.user_ns["loss"], *shell.shown
    assert isinstance(value, torch.Tensor)
    assert (value.item(), drawn) == shell.user_ns["expected"]
    assert isinstance(checked, Checked)
    assert checked.evidence.steps.kind == "training"
    assert checked.evidence.exit == "finished"
    assert checked.evidence.steps.num_observed >= 39
    assert checked.evidence.machine is not None, "with the ceilings of this machine, as on the command line"


@pytest.mark.usefixtures("untried")
def test_reports_name_cells_and_their_lines_and_no_temporary_paths(shell: Shell) -> None:
    shell.run_cell("num_steps = 60")
    shell.run_cell(f"%%flatout --seconds 1\n{TRAINING}")

    [checked] = [one for one in shell.shown if isinstance(one, Checked)]
    loop = next(s for s in checked.evidence.sources if s.text.startswith("return self.linear"))
    assert (Path(loop.file).name, loop.line) == ("cell 1", 9), "of the cell before, which the model is from"
    step = next(s for s in checked.evidence.sources if s.text == "optimizer.step()")
    assert (Path(step.file).name, step.line) == ("cell 3", 10), "as the cell's lines are counted, the magic's included"
    for text in (str(checked), checked.html(), checked.markdown(), checked._repr_html_()):
        # which of the lines cost enough to be named depends on what else runs here
        assert re.search(r"cell [13], line \d+", text), text
        assert "ipykernel" not in text


@pytest.mark.long
def test_check_of_a_step_that_a_cell_defines_names_the_cell(shell: Shell) -> None:
    shell.run_cell(
        "net = Rows()\n"
        "def step(x):\n"
        "    net(x).square().mean().backward()\n"
        "import flatout\n"
        "checked = flatout.check(step, [torch.randn(64, 32) for _ in range(30)], observe_s=1)"
    )

    checked = shell.user_ns["checked"]
    assert isinstance(checked, Checked)
    places = {(Path(s.file).name, s.line) for s in checked.evidence.sources}
    assert {("cell 1", 9), ("cell 2", 3)} <= places
    assert "ipykernel" not in checked.json()


@pytest.mark.usefixtures("untried")
def test_steps_end_the_cell_and_json_is_written(shell: Shell, tmp_path: Path) -> None:
    shell.run_cell("num_steps = 100_000")
    shell.run_cell(f"%%flatout --steps 30 --json=report.json --markdown 'in words.md'{TRAINING}")

    [checked] = [one for one in shell.shown if isinstance(one, Checked)]
    assert checked.evidence.exit == "stopped"
    assert 30 <= checked.evidence.steps.num_observed < 100
    i = shell.user_ns["i"]
    assert isinstance(i, int) and i < 200
    assert read_evidence((tmp_path / "report.json").read_bytes()) == checked.evidence
    assert (tmp_path / "in words.md").read_text().startswith("### flatout: ")


@pytest.mark.usefixtures("untried")
@pytest.mark.parametrize("error", ["KeyboardInterrupt()", "ZeroDivisionError('mine')"])
def test_what_ends_the_cell_passes_and_the_report_is_shown_before(shell: Shell, error: str) -> None:
    shell.run_cell("num_steps = 100")
    cell = TRAINING.replace("    optimizer.step()", f"    optimizer.step()\n    if i == 50: raise {error}")

    with pytest.raises((KeyboardInterrupt, ZeroDivisionError)):
        shell.run_cell(f"%%flatout{cell}")

    [checked] = shell.shown
    assert isinstance(checked, Checked)
    assert checked.evidence.exit == error
    assert checked.evidence.steps.num_timed > 30
    assert torch.nn.Module.__call__.__qualname__ == "Module._wrapped_call_impl", "nothing stays patched"


def test_magics_within_the_cell_run_and_blank_lines_count(shell: Shell) -> None:
    shell.run_cell("%%flatout\n\n\n%matplotlib inline\nimport sys\nwhere = sys._getframe().f_lineno")

    assert shell.ran == ["matplotlib inline"]
    assert shell.user_ns["where"] == 6
    [checked] = shell.shown
    assert "No step was seen" in str(checked)


def test_a_cell_that_does_not_compile_is_a_syntax_error_in_its_line(shell: Shell) -> None:
    with pytest.raises(SyntaxError) as error:
        shell.run_cell("%%flatout\nx = 1\nfor in x:\n    pass")
    assert error.value.lineno == 3
    assert shell.shown == []


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--stepps 30", "%%flatout has no option --stepps; it has --steps, --seconds, --json, --html, --markdown"),
        ("--steps", "%%flatout --steps has no value; write one after it"),
        ("--steps 3", "--steps 3 must be a whole number from 12 on"),
        ("--steps many", "--steps many must be a whole number from 12 on"),
        ("--seconds 0", "--seconds 0 must be a number above 0"),
        ("--seconds=soon", "--seconds soon must be a number above 0"),
    ],
)
def test_a_wrong_option_is_named_and_the_cell_does_not_run(shell: Shell, line: str, message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        shell.run_cell(f"%%flatout {line}\nran = True")
    assert "ran" not in shell.user_ns
