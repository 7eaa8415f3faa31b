"""Runs are run again: equal when nothing changed, and each planted change is named with the first step that differs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from tests.command_line import flatout

from flatout.blocks.recording.replay import replay
from flatout.blocks.recording.run import read_run, runs_in

PLAIN = """
    import os
    import torch
    from torch import nn
    import flatout
    from net import Net

    os.makedirs("outputs", exist_ok=True)
    for name in ("losses.txt", "outputs/log.txt", "data/cache.txt"):
        open(name, "w").write(os.getcwd())
    wide = torch.randn(1 << 20, generator=torch.Generator().manual_seed(1))
    with flatout.Run("runs", config={"lr": 0.1, "api_key": "abc"}) as run:
        torch.manual_seed(0)
        net, data = Net(), torch.randn(256, 300)
        order = [int(line) for line in open("data/order.txt")]
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for step in range(12):
            x = data[[order[(8 * step + i) % len(order)] for i in range(8)]]
            loss = net(x).square().mean() * wide.exp().sum() * 1e-6  # a sum that threads share
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.tick(loss=loss)
"""
RECORDED = 'flatout.Run("runs", config={"lr": 0.1, "api_key": "abc"})'
QUIET = "import contextlib\n" + textwrap.dedent(PLAIN).replace("run.tick(loss=loss)", "pass").replace(
    RECORDED, "contextlib.nullcontext()"
)
MIXED = """
    import torch
    import flatout
    from net import Net

    class Noisy(torch.utils.data.Dataset):
        def __len__(self):
            return 48
        def __getitem__(self, i):
            return torch.randn(300) + i

    if __name__ == "__main__":
        with flatout.Run("runs") as run:
            torch.manual_seed(0)
            net, precision = Net(), flatout.Precision("bfloat16")
            optimizer = torch.optim.AdamW(net.parameters(), fused=True)
            feed = flatout.Feed(Noisy(), flatout.Batches([1] * 48, 8, seed=3), workers=2, collate=torch.stack)
            for epoch in range(2):
                for x in feed:
                    with precision:
                        loss = net(x).float().square().mean()
                    precision.backward(loss)
                    precision.update(optimizer, max_norm=1.0)
                    optimizer.zero_grad()
                    run.tick(loss=loss)
"""
RANKS = """
    import torch
    import flatout
    from net import Net

    torch.manual_seed(0)
    texts = [torch.randn(1 + i % 5, 300) for i in range(96)]
    with flatout.World("cpu") as world, flatout.Run("runs") as run:
        torch.manual_seed(0)
        net = world.place(Net())
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        batches = flatout.Batches(map(len, texts), 8, rank=world.rank, num_ranks=world.num_ranks)
        for number, batch in enumerate(flatout.Feed(texts, batches)):
            loss = world.part_of_mean(net(batch.values).square().sum(), batches.step(number).num_tokens)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.tick(loss=loss)
"""
COMPILED = """
    import torch
    import flatout
    from net import Net
    from torch._dynamo.utils import counters

    with flatout.Run("runs") as run:
        torch.manual_seed(0)
        net, turn = Net(), torch.randn(300, 300)
        turned = torch.compile(lambda x: x @ turn)  # a product only: no C++ compiler is asked for anything
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for step in range(3):
            loss = net(turned(torch.randn(32, 300))).square().mean()
            optimizer.zero_grad()
            loss.backward()
            if step == 2:
                open("HITS", "w").write(str(counters["inductor"]["fxgraph_cache_hit"]))
            optimizer.step()
"""
NET = """
    import torch
    from torch import nn
    import helper

    class Net(nn.Sequential):
        def __init__(self):
            super().__init__(nn.Linear(300, 512), nn.Tanh(), nn.Linear(512, 1))
            helper.scale(self)
"""
HELPER = """
    import torch
    from numbers_lib import FACTOR

    def scale(net):
        with torch.no_grad():
            net[0].weight.mul_(0.5 * FACTOR)
"""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


class Recorded(NamedTuple):
    """A project, packages beside it, and a run of its plain script."""

    root: Path
    site: Path
    plain: Path
    is_index_alone: bool
    """Whether git's index was after the run what it was before."""


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """A repository with a committed net, an uncommitted change, an untracked helper, ignored data, and a file for credentials."""
    root, site = tmp_path_factory.mktemp("project"), tmp_path_factory.mktemp("site")
    for folder in ("data", "outputs"):
        (root / folder).mkdir()
    (root / "data" / "order.txt").write_text("".join(f"{(37 * i) % 256}\n" for i in range(256)))
    (root / "data" / "README.md").write_text("how the data were made\n")
    (root / ".gitignore").write_text("data/*.txt\nruns/\n__pycache__/\nlosses.txt\nhits.txt\noutputs/\n")
    (root / "net.py").write_text(textwrap.dedent(NET).replace("Tanh", "ReLU"))
    compiled = COMPILED.replace("HITS", str(root / "hits.txt"))
    for name, text in (("plain", PLAIN), ("quiet", QUIET), ("mixed", MIXED), ("ranks", RANKS), ("compiled", compiled)):
        (root / f"{name}.py").write_text(textwrap.dedent(text))
    who = ["-c", "user.name=A", "-c", "user.email=a@b.c"]
    for command in (["init", "-q"], ["add", "."], [*who, "commit", "-qm", "first"]):
        subprocess.run(["git", *command], cwd=root, check=True, capture_output=True)
    (root / "net.py").write_text(textwrap.dedent(NET))
    (root / "helper.py").write_text(textwrap.dedent(HELPER))
    (root / ".env").write_text("HF_TOKEN=hf_abcdefghijklmnopqrstuvwxyz\n")
    package(site, "1.0")
    index = (root / ".git" / "index").read_bytes()
    plain = ran(root, variables={"PYTHONPATH": on_path(site)})
    return Recorded(root, site, plain, is_index_alone=(root / ".git" / "index").read_bytes() == index)


@pytest.fixture
def project(recorded: Recorded, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The project on another number of threads than its runs have, its files the same again afterwards."""
    monkeypatch.setenv("PYTHONPATH", on_path(recorded.site))
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    root = recorded.root
    before = {path: path.read_text() for path in (*root.glob("*.py"), root / "data" / "order.txt")}
    yield root
    for path, text in before.items():
        path.write_text(text)


def on_path(site: Path) -> str:
    return f"{site}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"


def package(site: Path, version: str) -> None:
    """Install this version of a package, in the place of any other; its numbers are those of the version."""
    for other in site.glob("*.dist-info"):
        shutil.rmtree(other)
    (site / f"numbers_lib-{version}.dist-info").mkdir()
    (site / f"numbers_lib-{version}.dist-info" / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: numbers-lib\nVersion: {version}\n"
    )
    (site / "numbers_lib.py").write_text(f"FACTOR = {version}\n")


def ran(root: Path, script: str = "plain.py", *, ranks: int = 1, variables: dict[str, str] | None = None) -> Path:
    """The folder of a new run, on one thread."""
    starter = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", f"{ranks}"] if ranks > 1 else []
    done = started(root, *starter, script, "--token=abc", **(variables or {}))
    assert done.returncode == 0, done.stderr
    return runs_in(root / "runs")[-1][0]


def started(root: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=root,
        env={**os.environ, "OMP_NUM_THREADS": "1", **variables},
        capture_output=True,
        text=True,
        check=False,
    )


def changed_since(root: Path, script: str) -> None:
    for name in ("net.py", "helper.py", script):
        (root / name).write_text("raise SystemExit('changed since')\n")


@pytest.mark.long
def test_a_run_comes_out_the_same_whatever_became_of_the_code(project: Path) -> None:
    path = ran(project, "mixed.py")
    changed_since(project, "mixed.py")
    found = replay(path)
    assert (found.num_steps, found.difference, found.reasons) == (8, None, ())
    worktrees = subprocess.run(["git", "worktree", "list"], cwd=project, capture_output=True, text=True, check=True)
    assert len(worktrees.stdout.splitlines()) == 1


@pytest.mark.long
def test_a_replay_counts_recorded_threads_and_writes_over_nothing_of_the_users(
    project: Path, recorded: Recorded
) -> None:
    changed_since(project, "plain.py")
    said = flatout("replay", recorded.plain, folder=project)
    assert said.code == 0 and "EQUAL: 8 steps" in said.out
    for name in ("losses.txt", "outputs/log.txt", "data/cache.txt"):
        assert (project / name).read_text() == str(project)


def test_a_run_leaves_gits_index_alone(recorded: Recorded) -> None:
    assert recorded.is_index_alone


def test_no_credential_is_kept_and_what_was_left_out_is_named(recorded: Recorded) -> None:
    kept = b"".join(p.read_bytes() for p in recorded.plain.rglob("*") if p.is_file())
    assert b"hf_abcdef" not in kept and b"abc" not in kept.replace(b"abcdef", b"")
    record = read_run(recorded.plain)
    assert {".env", "config api_key", "--token"} <= {left.name for left in record.left_out}
    assert record.config == {"lr": "0.1"}
    assert (record.outcome, record.num_steps) == ("finished", 12)
    assert {"net.py", "helper.py", "plain.py"} <= set(record.code.sources)
    assert record.code.untracked == ("helper.py",) and record.code.changed == ("net.py",)


@pytest.mark.parametrize(
    ("file", "old", "new", "cause", "reason", "step", "threads"),
    [
        ("plain.py", "loss.backward()", "(loss if step < 5 else 2 * loss).backward()", "code", "'plain.py' changed", 5, "1"),
        ("data/order.txt", "37\n", "111\n", "data order", "of the samples", 0, "2"),
    ],
)  # fmt: skip
@pytest.mark.long
def test_a_changed_line_or_file_is_named_with_the_first_step_that_differs(
    project: Path,
    recorded: Recorded,
    monkeypatch: pytest.MonkeyPatch,
    file: str,
    old: str,
    new: str,
    cause: str,
    reason: str,
    step: int,
    threads: str,
) -> None:
    text = (project / file).read_text()
    assert old in text
    (project / file).write_text(text.replace(old, new, 1) if file != "data/order.txt" else _rotated(text))
    monkeypatch.setenv("OMP_NUM_THREADS", threads)
    found = replay(recorded.plain, is_here=True)
    assert found.difference is not None and found.difference.step == step
    assert found.reasons[0].cause == cause
    assert reason in found.reasons[0].text


def _rotated(text: str) -> str:
    """The same samples in another order."""
    lines = text.splitlines(keepends=True)
    return "".join(lines[9:] + lines[:9])


@pytest.mark.long
def test_the_commands_say_what_has_changed(project: Path, recorded: Recorded, tmp_path: Path) -> None:
    first = recorded.plain
    (project / "helper.py").write_text(textwrap.dedent(HELPER).replace("0.5", "0.25"))
    second = ran(project)
    assert second != first
    said = flatout("replay", first, "--here", "--json", tmp_path / "found.json", folder=project)
    assert said.code == 1
    assert json.loads((tmp_path / "found.json").read_text())["difference"]["step"] == 0
    assert "DIFFERENT: step 0" in said.out and "likely  code: untracked file 'helper.py' changed" in said.out
    said = flatout("runs", folder=project)
    assert first.name in said.out and second.name in said.out and "lr=0.1" in said.out
    assert "no run" in flatout("runs", "--where", "lr=0.2", folder=project).out
    said = flatout("runs", "diff", first, second, folder=project)
    assert "untracked file 'helper.py' changed" in said.out and "differ from step 0 on" in said.out
    said = flatout("replay", "runs/none", folder=project)
    assert said.code == 2 and "give the folder of a run" in said.err and "Traceback" not in said.err


@pytest.mark.long
def test_an_unchanged_script_is_watched_and_replayed(project: Path) -> None:
    said = started(project, "-m", "flatout", "watch", "quiet.py")
    assert said.returncode == 0, said.stderr
    path, record = runs_in(project / "runs")[-1]
    assert record.num_steps == 12 and record.speed is not None and record.outcome == "finished"
    assert replay(path).difference is None
    (project / "quiet.py").write_text("raise ValueError('broken')\n")
    assert started(project, "-m", "flatout", "watch", "quiet.py").returncode == 1
    failed = runs_in(project / "runs")[-1][1]
    assert (failed.outcome, failed.error) == ("failed", "ValueError: broken")


@pytest.mark.usefixtures("project")
@pytest.mark.long
def test_another_number_of_threads_is_named(recorded: Recorded) -> None:
    found = replay(recorded.plain, is_here=True)
    assert found.difference is not None and (found.difference.step, found.difference.what) == (0, "loss")
    assert found.reasons[0].cause == "threads" and "1 -> 2" in found.reasons[0].text


@pytest.mark.usefixtures("project")
@pytest.mark.long
def test_another_version_of_a_package_is_named(recorded: Recorded) -> None:
    package(recorded.site, "1.5")
    try:
        found = replay(recorded.plain)
    finally:
        package(recorded.site, "1.0")
    assert found.difference is not None and found.difference.step == 0
    assert found.reasons[0] == ("package", "numbers-lib: 1.0 -> 1.5")


@pytest.mark.multi
@pytest.mark.long
def test_a_run_of_two_ranks_is_run_again_on_two(project: Path) -> None:
    path = ran(project, "ranks.py", ranks=2)
    assert read_run(path).surroundings.world_size == 2
    found = replay(path)
    assert (found.num_steps, found.difference) == (8, None)
    (project / "helper.py").write_text(textwrap.dedent(HELPER).replace("0.5", "0.25"))
    changed = replay(path, is_here=True)
    assert changed.difference is not None
    assert (changed.difference.step, changed.difference.what) == (0, "loss")
    assert changed.reasons[0].cause == "code"
    assert not any("TORCHELASTIC" in r.text or "RANK" in r.text for r in changed.reasons)


@pytest.mark.long
def test_a_replay_runs_what_was_compiled_then(project: Path, tmp_path: Path) -> None:
    hits = project / "hits.txt"
    path = ran(project, "compiled.py", variables={"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "one")})
    assert (path / "compiled.bin").stat().st_size > 0
    assert hits.read_text() == "0"
    record = (path / "run.json").read_text()
    (path / "run.json").write_text(
        record.replace(str(tmp_path / "one"), str(tmp_path / "two"))
    )  # another machine's, empty
    found = replay(path)
    assert (found.num_steps, found.difference) == (3, None)
    assert int(hits.read_text()) > 0
