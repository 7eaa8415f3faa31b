"""`flatout tune --workers`: comparisons as tasks of a job array, and of Ray."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from tests.command_line import flatout

from flatout.app.tune_workers import RayWorkers, SlurmWorkers, workers_of
from flatout.core.errors import UsageError
from flatout.core.records.lever import PlannedLever
from flatout.core.records.plan import Plan, Tuned
from flatout.core.records.record import from_json
from flatout.tune.search.comparisons import LeverComparison
from flatout.tune.verify.proof_terms import ProofTerms
from flatout.tune.verify.side_process import Request

SBATCH = """\
#!{python}
# Runs the tasks of an array beside one another on this machine, as Slurm would on several.
import os, subprocess, sys
options = dict(a[2:].partition("=")[::2] for a in sys.argv[1:] if a.startswith("--"))
if "refuse" in options:
    sys.exit("sbatch: error: Batch job submission failed: Invalid partition")
first, last = map(int, options["array"].split("-"))
for number in range(first, last + 1):
    log = open(options["output"].replace("%a", str(number)), "w")
    task = subprocess.Popen(["bash", "-c", options["wrap"]], env=os.environ | {{"SLURM_ARRAY_TASK_ID": str(number)}},
                            stdout=log, stderr=log, start_new_session=True)
    open(os.path.join({folder!r}, f"7_{{number}}"), "w").write(str(task.pid))
open(os.path.join({folder!r}, "calls"), "a").write(" ".join(sys.argv[1:]) + "\\n")
print("7;cluster")
"""
SQUEUE = """\
#!{python}
import os, sys
name = sys.argv[sys.argv.index("--jobs") + 1]
path = os.path.join({folder!r}, name)
if os.path.exists(path) and os.path.exists(f"/proc/{{open(path).read()}}"):
    print("RUNNING")
"""
SCANCEL = """\
#!{python}
import os, signal, sys
open(os.path.join({folder!r}, "cancelled"), "a").write(sys.argv[1] + "\\n")
try:
    os.killpg(int(open(os.path.join({folder!r}, sys.argv[1])).read()), signal.SIGKILL)
except (OSError, ValueError):
    pass
"""
SCRIPT = """
    import torch
    from torch import nn
    torch.manual_seed(0)
    torch.autograd.set_detect_anomaly(True)
    net = nn.Sequential(*[nn.Linear(64, 64) for _ in range(20)])
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    for step in range(100_000):
        loss = net(torch.randn(8, 64)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""
DEBUG_OFF = PlannedLever(id="graph.debug-off", guarantee="exact")


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "train.py").write_text(textwrap.dedent(SCRIPT))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return tmp_path


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with what commands of the names of Slurm's have done."""
    programs, folder = tmp_path / "bin", tmp_path / "tasks"
    programs.mkdir()
    folder.mkdir()
    for name, text in (("sbatch", SBATCH), ("squeue", SQUEUE), ("scancel", SCANCEL)):
        (programs / name).write_text(text.format(python=sys.executable, folder=str(folder)))
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    return folder


def real(*levers: PlannedLever) -> LeverComparison:
    terms = ProofTerms(budget_s=2.0, timeout_s=60.0, num_steps=4, num_processes=1)
    return LeverComparison.of(
        Request(target="train.py"), Plan(script="train.py"), ((), levers), usual_terms=terms, terms=terms
    )


@pytest.mark.slow
@pytest.mark.long
def test_tasks_of_an_array_compare_and_their_verdicts_come_back(project: Path, slurm: Path) -> None:
    workers = SlurmWorkers(2, project / "work", ["--gres=gpu:0"])

    good, bad = workers.start([real(DEBUG_OFF), real(PlannedLever(id="no.such-lever", guarantee="exact"))])

    verdict = good.verdict(90.0)
    assert verdict is not None, (project / "work" / "0.log").read_text()
    assert verdict.equality.holds
    assert verdict.device == "cpu"
    assert bad.verdict(60.0) is None
    call = (slurm / "calls").read_text()
    assert "--array=0-1" in call
    assert "--gres=gpu:0" in call


@pytest.mark.slow
def test_a_task_that_slurm_knows_no_more_has_failed_and_one_that_is_not_wanted_is_cancelled(
    project: Path, slurm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flatout.app.tune_workers._ASK_S", 0.5)
    monkeypatch.setattr("flatout.app.tune_workers._GRACE_S", 1.0)
    workers = SlurmWorkers(2, project / "work", [])
    killed, unwanted = workers.start([real(DEBUG_OFF), real(DEBUG_OFF)])
    unwanted.cancel()
    unwanted.cancel()
    subprocess.run(["scancel", "7_0"], check=True)

    assert killed.verdict(60.0) is None
    assert (slurm / "cancelled").read_text().split() == ["7_1", "7_0"]


def test_time_that_is_up_ends_the_waiting(project: Path, slurm: Path) -> None:
    (task,) = SlurmWorkers(1, project / "work", []).start([real(DEBUG_OFF)])

    assert task.verdict(0.0) is None
    task.cancel()


@pytest.mark.usefixtures("slurm")
def test_what_slurm_refuses_is_said(project: Path) -> None:
    with pytest.raises(UsageError, match=r"sbatch refuses the workers: .*Invalid partition"):
        SlurmWorkers(1, project / "work", ["--refuse"]).start([real(DEBUG_OFF)])


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.usefixtures("slurm")
def test_a_search_with_workers_finds_what_one_without_finds(project: Path, slurm: Path) -> None:
    command = [sys.executable, "-m", "flatout.app.cli", "tune", "--time-budget", "100s", "--json", "found.json"]

    done = subprocess.run(
        [*command, "--workers", "slurm:2", "train.py"], cwd=project, capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stderr
    tuned = from_json((project / "found.json").read_bytes(), Tuned)
    assert "graph.debug-off" in [planned.id for planned in tuned.plan.lever]
    assert tuned.proof is not None
    assert tuned.proof.outcome == "proved"
    assert (slurm / "calls").read_text().count("--array") >= 1
    assert not (project / ".plan.workers").exists()


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed: pip install 'flatout[ray]'")
@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("project")
def test_tasks_of_ray_compare_and_their_verdicts_come_back() -> None:
    import ray

    workers = RayWorkers(2, {"num_cpus": 1.0})
    try:
        good, bad = workers.start([real(DEBUG_OFF), real(PlannedLever(id="no.such-lever", guarantee="exact"))])
        verdict = good.verdict(120.0)
        assert verdict is not None
        assert verdict.equality.holds
        assert bad.verdict(60.0) is None
        (late,) = workers.start([real(DEBUG_OFF)])
        assert late.verdict(0.01) is None
        late.cancel()
    finally:
        ray.shutdown()


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("slurm", (), "give slurm:N or ray:N"),
        ("slurm:0", (), "with N from 1"),
        ("slurm:x", (), "give slurm:N"),
        ("pbs:4", (), "give slurm:N"),
        ("", ("--gres=gpu:1",), "options for workers need --workers"),
    ],
)
def test_workers_that_are_none_are_refused(tmp_path: Path, text: str, options: tuple[str, ...], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        workers_of(text, tmp_path, options=options)


def test_a_scheduler_that_is_not_here_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "train.py").write_text("")

    ended = flatout("tune", "--workers", "slurm:2", "train.py", folder=tmp_path)

    assert ended.code == 2
    assert "there is no sbatch, squeue, scancel here" in ended.err
    if importlib.util.find_spec("ray") is None:
        assert "pip install 'flatout[ray]'" in flatout("tune", "--workers", "ray:2", "train.py", folder=tmp_path).err
