"""`flatout edit`, as it is typed: stdout is a diff, stderr what stays, and the exit code says whether something did."""

from __future__ import annotations

import runpy
import subprocess
import textwrap
from pathlib import Path

import msgspec
import pytest
from tests.command_line import Ended, flatout
from tests.planning_world import verdict

from flatout.core.records.lever import PlannedLever
from flatout.core.records.plan import Plan, from_toml, to_toml
from flatout.core.records.verdict import Equality, Speed
from flatout.core.registry import lever_of

pytestmark = pytest.mark.slow

SCRIPT = """
    import sys

    import torch
    from torch import nn

    torch.autograd.set_detect_anomaly(True)
    net = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    print("anomaly", torch.is_anomaly_enabled(), "fused", bool(optimizer.defaults["fused"]))
"""
MODULE = """
    import torch
    from torch import nn

    torch.autograd.set_detect_anomaly(True)
    torch.manual_seed(0)
    net = nn.Linear(4, 2)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    for step in opened(40):
        loss = net(torch.randn(8, 4)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""
DEBUG_OFF = PlannedLever(id="graph.debug-off", guarantee="exact")
FUSED = PlannedLever(id="parallelism.fused-optimizer", guarantee="bounded")
CAPTURE = PlannedLever(id="graph.capture", guarantee="exact")
GONE = PlannedLever(
    id="memory.gather-once",
    guarantee="exact",
    parameters={"file": "train.py", "function": "main", "code": "bank = torch.cat([bank, row])"},
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(textwrap.dedent(SCRIPT))
    return tmp_path


def edit(folder: Path, *options: str, levers: tuple[PlannedLever, ...], arguments: tuple[str, ...] = ()) -> Ended:
    (folder / "plan.toml").write_bytes(to_toml(Plan(script="train.py", lever=levers)))
    return flatout("edit", "--no-verify", "--plan", "plan.toml", *options, "train.py", *arguments, folder=folder)


def test_the_diff_alone_is_printed_and_nothing_is_changed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (folder / "train.py").read_text()
    done = edit(folder, levers=(DEBUG_OFF, FUSED), arguments=("--", "--lr", "3"))
    assert (done.code, done.err) == (0, "")
    assert (folder / "train.py").read_text() == before
    subprocess.run(["patch", "-p1", "-s"], input=done.out, text=True, cwd=folder, check=True)
    runpy.run_path(str(folder / "train.py"), run_name="__main__")
    assert capsys.readouterr().out == "anomaly False fused True\n"


def test_what_stays_is_named_and_its_plan_is_written(folder: Path) -> None:
    done = edit(folder, "--write", "--rest", "rest.toml", levers=(DEBUG_OFF, CAPTURE))
    assert done.code == 4
    assert "wrote" in done.err and "graph.capture stays in the plan: " in done.err
    assert "anomaly(True)" not in (folder / "train.py").read_text()
    assert from_toml((folder / "rest.toml").read_bytes()).lever == (CAPTURE,)


def test_a_plan_of_another_text_is_refused_in_one_line(folder: Path) -> None:
    before = (folder / "train.py").read_text()
    done = edit(folder, "--write", levers=(DEBUG_OFF, GONE))
    assert (done.code, done.out) == (2, "")
    assert "another text" in done.err and "Traceback" not in done.err
    assert (folder / "train.py").read_text() == before


def test_copies_go_where_they_are_wanted(folder: Path) -> None:
    assert edit(folder, "--out", "edited", levers=(FUSED,)).code == 0
    assert "fused=True" in (folder / "edited" / "train.py").read_text()
    assert "fused=True" not in (folder / "train.py").read_text()
    assert edit(folder, "--out", "edited", "--write", levers=(FUSED,)).code == 2


TRAINING = """
    import torch
    from torch import nn

    torch.autograd.set_detect_anomaly(True)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    x = torch.randn(32, 8)
    for step in range(400):
        optimizer.zero_grad()
        net(x).square().mean().backward()
        optimizer.step()
"""
KEPT = PlannedLever(id="memory.allocator-settings", guarantee="exact", parameters={"kept_bytes": 1 << 30})


@pytest.fixture
def training(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(textwrap.dedent(TRAINING))
    (tmp_path / "plan.toml").write_bytes(to_toml(Plan(script="train.py", lever=(DEBUG_OFF,))))
    return tmp_path


def verified_edit(folder: Path, *options: str) -> Ended:
    return flatout("edit", "--plan", "plan.toml", *options, "train.py", folder=folder)


def test_the_text_runs_beside_the_script_before_it_is_printed(training: Path) -> None:
    done = verified_edit(training)
    assert done.code == 0, done.err
    assert done.out.startswith("--- a/train.py") and "verified: " in done.err


@pytest.mark.long
def test_a_text_that_does_something_else_is_not_printed(training: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def slower_rate(text: str, parameters: object) -> str:
        return text.replace("lr=0.01", "lr=0.02")

    wrong = msgspec.structs.replace(lever_of(DEBUG_OFF.id), edit=slower_rate)
    monkeypatch.setattr("flatout.tune.edits.lever_of", lambda id: wrong)
    done = verified_edit(training, "--write")
    assert (done.code, done.out) == (1, "")
    assert "does something else than the script" in done.err and "step 1, parameter" in done.err
    assert "of its norm, " in done.err  # how far off, and how far it may be
    assert "lr=0.01" in (training / "train.py").read_text()


@pytest.mark.long
def test_a_text_that_differs_in_one_run_of_two_is_not_verified(training: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first run takes another rate than all later ones."""

    def other_at_first(text: str, parameters: object) -> str:
        rate = "0.01 if __import__('os').path.exists('ran') else 0.02"
        return text.replace("lr=0.01", f"lr={rate}").replace("x = torch", "open('ran', 'w').close()\nx = torch")

    shaky = msgspec.structs.replace(lever_of(DEBUG_OFF.id), edit=other_at_first)
    monkeypatch.setattr("flatout.tune.edits.lever_of", lambda id: shaky)
    done = verified_edit(training)
    assert done.code == 3
    assert done.out.startswith("# NOT VERIFIED: one of two runs was not like the script: DIFFERENT: step 1")


@pytest.mark.long
def test_what_could_not_be_verified_says_so_first(folder: Path) -> None:
    """The script takes no step that could be compared."""
    (folder / "plan.toml").write_bytes(to_toml(Plan(script="train.py", lever=(DEBUG_OFF,))))
    done = verified_edit(folder)
    assert done.code == 3
    assert done.out.startswith("# NOT VERIFIED: ") and "--- a/train.py" in done.out


def test_a_setting_of_the_environment_is_a_command_line(folder: Path) -> None:
    done = edit(folder, levers=(DEBUG_OFF, KEPT), arguments=("--", "--lr", "3"))
    assert done.code == 0
    assert "mallopt" not in done.out
    assert f"MALLOC_TRIM_THRESHOLD_={1 << 30} python train.py --lr 3" in done.err


@pytest.mark.long
def test_a_module_is_edited_in_the_folder_that_it_is_run_from(folder: Path) -> None:
    package = folder / "mine"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "train.py").write_text("from mine.helper import opened\n" + textwrap.dedent(MODULE))
    (package / "helper.py").write_text("def opened(steps):\n    return range(steps)\n")
    (folder / "plan.toml").write_bytes(
        to_toml(Plan(script="mine/train.py", module="mine.train", lever=(DEBUG_OFF, FUSED)))
    )
    done = flatout("edit", "--plan", "plan.toml", "-m", "mine.train", folder=folder)
    assert done.code == 0, done.err
    assert "--- a/mine/train.py" in done.out and "fused=True" in done.out
    assert "verified" in done.err
    other = flatout("edit", "--plan", "plan.toml", "-m", "mine.absent", folder=folder)
    assert other.code == 2 and "mine.absent" in other.err and "Traceback" not in other.err


LANGUAGE = """
    import torch
    import torch.nn.functional as F
    from torch import nn


    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(64, 16)
            self.head = nn.Linear(16, 64)

        def forward(self, x, y):
            logits = self.head(torch.tanh(self.embed(x)))
            loss = F.cross_entropy(logits.view(-1, logits.size(-1)), y.view(-1))
            return logits, loss


    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(400):
        x = torch.randint(64, (4, 16))
        optimizer.zero_grad()
        net(x, x * 7 % 64)[1].backward()
        optimizer.step()
"""
FLOAT8 = PlannedLever(
    id="workload.float8-loss",
    guarantee="quality",
    parameters={
        "file": "train.py",
        "function": "Net.forward",
        "code": "loss = F.cross_entropy(logits.view(-1, logits.size(-1)), y.view(-1))",
    },
)


@pytest.mark.long
def test_the_text_of_a_plan_that_costs_precision_runs_beside_the_plan(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(textwrap.dedent(LANGUAGE))
    plan = Plan(script="train.py", lever=(FLOAT8,), guarantee="quality")
    (tmp_path / "plan.toml").write_bytes(to_toml(plan))
    done = verified_edit(tmp_path)
    assert done.code == 0, done.err
    assert "float8=True" in done.out and "verified: " in done.err
    judged = flatout("verify", "--allow", "quality", "--no-speed", "plan.toml", "train.py", folder=tmp_path)
    assert judged.code == 0, judged.out + judged.err
    assert "PROVED: equal in quality" in judged.out and "over 3 seeds" in " ".join(judged.out.split())
    refused = flatout("verify", "--no-speed", "plan.toml", "train.py", folder=tmp_path)
    assert refused.code == 1 and "DIFFERENT" in refused.out


@pytest.mark.parametrize(("speed", "code"), [(0.98, 0), (0.7, 3)])
def test_beside_its_plan_a_text_may_be_slower_by_what_is_noise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, speed: float, code: int
) -> None:
    raced = Speed(ratio=speed, low=speed - 0.01, high=speed + 0.01, num_pairs=20, before_s=1.0, after_s=1 / speed)
    slower = verdict(Equality(guarantee="bounded", holds=True), raced, "slower", "equal, and slower")
    monkeypatch.setattr("flatout.tune.verify.proof.prove_script", lambda *_, **__: slower)
    (tmp_path / "train.py").write_text(textwrap.dedent(LANGUAGE))
    (tmp_path / "plan.toml").write_bytes(to_toml(Plan(script="train.py", lever=(FLOAT8,), guarantee="quality")))
    done = verified_edit(tmp_path)
    assert done.code == code
    assert ("slower here" in done.out) == (code == 3) and ("at 0.98x the plan's speed" in done.err) == (code == 0)
