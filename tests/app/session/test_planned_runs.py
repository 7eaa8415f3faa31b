"""`flatout run --plan` and `flatout verify`, as they are typed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from unittest.mock import patch

import msgspec
import pytest
import torch
from tests.command_line import Ended, flatout

from flatout.app.cli.children import planned_run as planned
from flatout.core.records.lever import PlannedLever
from flatout.core.records.plan import Circumstances, Plan, digest_of_text, from_toml, to_toml
from flatout.tune.apply import circumstances

pytestmark = pytest.mark.slow

SCRIPT = """
    import os, sys
    import torch
    from torch import nn

    torch.autograd.set_detect_anomaly(True)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    x = torch.randn(64, 16)
    for step in range(60):
        loss = net(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print("anomaly", torch.is_anomaly_enabled(), "fused", bool(optimizer.defaults["fused"]), "loss", f"{loss.item():.4f}")
    print("kept", os.environ.get("MALLOC_TRIM_THRESHOLD_"), "given", sys.argv[1:])
    sys.exit(int(sys.argv[1]) if sys.argv[1:] else 0)
"""
DEBUG_OFF = PlannedLever(id="graph.debug-off", guarantee="exact")
FUSED = PlannedLever(id="parallelism.fused-optimizer", guarantee="bounded")
KEPT = PlannedLever(id="memory.allocator-settings", guarantee="exact", parameters={"kept_bytes": 1 << 30})
CHANNELS = PlannedLever(id="memory.channels-last", guarantee="bounded")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(textwrap.dedent(SCRIPT))
    return tmp_path


def started(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "flatout", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env={**os.environ, "COLUMNS": "100"},
    )


def write(folder: Path, *levers: PlannedLever, proved_on: Circumstances | None = None) -> None:
    plan = Plan(script="train.py", lever=levers, proved_on=proved_on or circumstances())
    (folder / "plan.toml").write_bytes(to_toml(plan))


def here(folder: Path, *arguments: str) -> Ended:
    """A plain run of a plan in this process, which is put back to what it was."""
    with patch.object(sys, "path", ["", *sys.path]), torch.autograd.set_detect_anomaly(False):
        return flatout(*arguments, folder=folder)


def go_on_here(program: str, command: list[str], environment: dict[str, str]) -> None:
    """What the process would become, in this one: `python -m MODULE ARGUMENTS`."""
    [python, minus_m, module, *arguments] = command
    assert (python, minus_m, module) == (program, "-m", "flatout.app.cli.children.planned_run")
    with (
        patch.dict(os.environ, environment),
        patch.object(sys, "argv", [module, *arguments]),
        patch.object(sys, "path", ["", *sys.path]),
        torch.autograd.set_detect_anomaly(False),  # which the script switches on
    ):
        sys.exit(planned.main())


@pytest.mark.long
def test_an_unchanged_script_runs_with_the_levers_pulled(folder: Path) -> None:
    write(folder, DEBUG_OFF, FUSED, KEPT)
    plain = started(folder, "run", "--plan", "plan.toml", "train.py", "--", "3", "--lr")
    assert plain.returncode == 3
    assert "anomaly False fused True" in plain.stdout
    assert f"kept {1 << 30} given ['3', '--lr']" in plain.stdout
    assert plain.stderr == ""


def test_a_lever_that_met_nothing_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(folder, FUSED, CHANNELS)
    monkeypatch.setattr("os.execve", go_on_here)
    done = here(folder, "run", "--plan", "plan.toml", "train.py")
    assert done.code == 0
    assert "memory.channels-last" in done.err
    assert "fused-optimizer" not in done.err


@pytest.mark.long
def test_losses_are_compared_with_those_of_the_untouched_script(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(folder, DEBUG_OFF, FUSED)
    monkeypatch.setattr("os.execve", go_on_here)
    command = ("run", "--plan", "plan.toml", "--check-after", "40", "train.py")
    done = flatout(*command, folder=folder)
    assert done.code == 0, done.err
    assert "after 40 losses the mean of the last fifth is " in done.err and "WARNING" not in done.err
    plan = from_toml((folder / "plan.toml").read_bytes())
    assert plan.losses is not None and len(set(plan.losses.means)) == 3, "three seeds learn three things"
    other = msgspec.structs.replace(plan, losses=msgspec.structs.replace(plan.losses, means=(9.0, 9.1, 9.2)))
    (folder / "plan.toml").write_bytes(to_toml(other))
    done = flatout(*command, folder=folder)
    assert done.code == 0
    assert "WARNING: the plan may have changed what is learnt here" in done.err, (
        "what the plan holds is not measured again"
    )
    done = flatout(*command, "--", "0", folder=folder)
    assert "WARNING" not in done.err, "another argument is another run"


@pytest.mark.parametrize(
    ("levers", "proved_on", "environment", "why"),
    [
        ((PlannedLever(id="memory.accumulate", guarantee="bounded"),), None, {}, "memory.accumulate changes how many"),
        ((FUSED,), Circumstances(device="NVIDIA H200"), {}, "device: NVIDIA H200 there"),
        ((FUSED,), None, {"RANK": "1", "WORLD_SIZE": "2"}, "run once with one process first"),
    ],
)
def test_losses_that_cannot_be_compared_are_refused_before_anything_runs(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    levers: tuple[PlannedLever, ...],
    proved_on: Circumstances | None,
    environment: dict[str, str],
    why: str,
) -> None:
    write(folder, *levers, proved_on=proved_on)
    (folder / "train.py").write_text("raise SystemExit('it ran')\n")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    done = flatout("run", "--plan", "plan.toml", "--check-after", "40", "train.py", folder=folder)
    assert (done.code, done.out) == (2, "")
    assert why in " ".join(done.err.split()) and "it ran" not in done.err


@pytest.mark.long
def test_more_losses_than_the_script_has_are_refused(folder: Path) -> None:
    write(folder, DEBUG_OFF)
    done = flatout("run", "--plan", "plan.toml", "--check-after", "100", "train.py", folder=folder)
    assert done.code == 2
    assert "it ended after 60, ask for as many at most" in " ".join(done.err.split())
    assert from_toml((folder / "plan.toml").read_bytes()).losses is None


def test_what_would_run_is_printed_and_nothing_starts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(folder, FUSED, KEPT)
    (folder / "train.py").write_text("raise SystemExit('it ran')\n")
    monkeypatch.setattr("os.execve", go_on_here)
    done = flatout("run", "--plan", "plan.toml", "--print", "train.py", folder=folder)
    assert done.code == 0, done.err
    assert done.out.splitlines() == [
        "parallelism.fused-optimizer  (bounded)",
        f"memory.allocator-settings  (exact)  kept_bytes={1 << 30}",
    ]
    write(folder, FUSED, proved_on=Circumstances(device="NVIDIA H200"))
    done = flatout("run", "--plan", "plan.toml", "--print", "train.py", folder=folder)
    assert (done.code, done.out) == (2, "")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('[proved_on]\ndevice = "NVIDIA H200"', "device: NVIDIA H200 there"),
        (
            '[proved_on]\nmodels = [600, 9]\n[[lever]]\nid = "parallelism.fused-optimizer"\nguarantee = "bounded"',
            "parameters of the model: 600 or 9 there, 577 here",
        ),
        ('[[lever]]\nid = "graph.magic"\nguarantee = "exact"', "no lever 'graph.magic'"),
        ("[[lev", "no TOML"),
        ('[[lever]]\nid = "parallelism.thread-count"\nguarantee = "bounded"', "num_threads"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused_in_one_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch, text: str, why: str
) -> None:
    (folder / "plan.toml").write_text(text)
    monkeypatch.setattr("os.execve", go_on_here)
    done = here(folder, "run", "--plan", "plan.toml", "train.py")
    assert (done.code, done.out) == (2, "")
    assert why in done.err
    assert "Traceback" not in done.err


def test_a_plan_for_another_script_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Plan(script="vae.py", script_digest=digest_of_text(b"import vae"), lever=(DEBUG_OFF,))
    (folder / "plan.toml").write_bytes(to_toml(plan))
    monkeypatch.setattr("os.execve", go_on_here)
    done = here(folder, "run", "--plan", "plan.toml", "train.py")
    assert (done.code, done.out) == (2, "")
    assert "script: vae.py there, train.py here" in done.err and "Traceback" not in done.err


def test_a_script_that_changed_since_runs_with_a_message(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Plan(script="train.py", script_digest=digest_of_text(b"as it was"), lever=(DEBUG_OFF,))
    (folder / "plan.toml").write_bytes(to_toml(plan))
    monkeypatch.setattr("os.execve", go_on_here)
    done = here(folder, "run", "--plan", "plan.toml", "train.py")
    assert done.code == 0
    assert "train.py has changed since the plan was proved" in done.err


@pytest.mark.long
def test_only_the_levers_of_the_plan_are_imported(folder: Path) -> None:
    (folder / "train.py").write_text(
        "import sys\nprint(sorted(m for m in sys.modules if m.startswith('flatout.tune.levers.') and m.count('.') == 4))\n"
        "print(*(m in sys.modules for m in ('typer', 'flatout.check.diagnosis', 'libcst._nodes')))\n"
    )
    write(folder, DEBUG_OFF)
    done = started(folder, "run", "--plan", "plan.toml", "train.py")
    assert done.stdout.splitlines() == ["['flatout.tune.levers.graph.debug_off']", "False False False"], done.stderr


def test_a_plan_is_proved_again(folder: Path) -> None:
    write(folder, DEBUG_OFF, FUSED)
    words = ("--no-speed", "--steps", "4", "--json", "verdict.json", "plan.toml", "train.py")
    done = flatout("verify", *words, folder=folder)
    assert done.code == 0, done.out + done.err
    assert "PROVED" in done.out
    verdict = json.loads((folder / "verdict.json").read_text())
    assert (verdict["outcome"], verdict["equality"]["guarantee"]) == ("proved", "bounded")


@pytest.mark.long
def test_a_wrong_edit_is_told_with_its_step_and_tensor(folder: Path) -> None:
    (folder / "after.py").write_text(textwrap.dedent(SCRIPT).replace("lr=1e-2", "lr=1.01e-2"))
    done = flatout("verify", "--no-speed", "--steps", "4", "train.py", "after.py", folder=folder)
    assert done.code == 1
    assert "DIFFERENT: step 1, parameter" in done.out


@pytest.mark.parametrize(
    "arguments",
    [
        ("train.py", "none.py"),
        ("--allow", "most", "train.py", "train.py"),
        ("--steps", "0", "train.py", "train.py"),
    ],
)
def test_what_cannot_be_asked_is_refused(folder: Path, arguments: tuple[str, ...]) -> None:
    done = flatout("verify", *arguments, folder=folder)
    assert done.code == 2
    assert "Traceback" not in done.err
