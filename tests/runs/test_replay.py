"""Runs are run again: equal when nothing changed, and each planted change is named with the first step that differs."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from flatout.runs.replay import replay
from flatout.runs.run import read_run, runs_in

PLAIN = """
    import sys
    import torch
    from torch import nn
    import flatout
    from net import Net

    with flatout.Run("runs", config={"lr": 0.1, "api_key": "abc"}) as run:
        torch.manual_seed(0)
        net, data = Net(), torch.randn(256, 300)
        order = [int(line) for line in open("data/order.txt")]
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for step in range(12):
            x = data[[order[(8 * step + i) % len(order)] for i in range(8)]]
            loss = net(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.tick(loss=loss)
"""
WORKERS = """
    import torch
    from torch import nn
    import flatout
    from net import Net

    class Noisy(torch.utils.data.Dataset):
        def __len__(self):
            return 64
        def __getitem__(self, i):
            return torch.randn(300) + i

    if __name__ == "__main__":
        with flatout.Run("runs") as run:
            torch.manual_seed(0)
            net = Net()
            optimizer = torch.optim.Adam(net.parameters())
            feed = flatout.Feed(Noisy(), flatout.Batches([1] * 64, 8, seed=3), workers=2, collate=torch.stack)
            for epoch in range(2):
                for x in feed:
                    loss = net(x).square().mean()
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                    run.tick(loss=loss)
"""
MIXED = """
    import torch
    import flatout
    from net import Net

    with flatout.Run("runs") as run:
        torch.manual_seed(0)
        net, precision = Net(), flatout.Precision("bfloat16")
        optimizer = torch.optim.AdamW(net.parameters(), fused=True)
        for step in range(12):
            with precision:
                loss = net(torch.randn(32, 300)).float().square().mean()
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
                open(OUT, "w").write(str(counters["inductor"]["fxgraph_cache_hit"]))
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

    def scale(net):
        with torch.no_grad():
            net[0].weight.mul_(0.5)
"""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A repository with a committed net, an uncommitted change, an untracked helper, ignored data, and a file for credentials."""
    root = tmp_path / "project"
    (root / "data").mkdir(parents=True)
    (root / "data" / "order.txt").write_text("".join(f"{(37 * i) % 256}\n" for i in range(256)))
    (root / "data" / "README.md").write_text("how the data were made\n")
    (root / ".gitignore").write_text("data/*.txt\nruns/\n__pycache__/\n")
    (root / "net.py").write_text(textwrap.dedent(NET).replace("Tanh", "ReLU"))
    for name, text in (("plain", PLAIN), ("workers", WORKERS), ("mixed", MIXED), ("ranks", RANKS)):
        (root / f"{name}.py").write_text(textwrap.dedent(text))
    who = ["-c", "user.name=A", "-c", "user.email=a@b.c"]
    for command in (["init", "-q"], ["add", "."], [*who, "commit", "-qm", "first"]):
        subprocess.run(["git", *command], cwd=root, check=True, capture_output=True)
    (root / "net.py").write_text(textwrap.dedent(NET))
    (root / "helper.py").write_text(textwrap.dedent(HELPER))
    (root / ".env").write_text("HF_TOKEN=hf_abcdefghijklmnopqrstuvwxyz\n")
    return root


def ran(root: Path, script: str = "plain.py", *, ranks: int = 1, variables: dict[str, str] | None = None) -> Path:
    """The folder of a new run."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **(variables or {})}
    starter = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", f"{ranks}"] if ranks > 1 else []
    done = subprocess.run(
        [sys.executable, *starter, script, "--token=abc"],
        cwd=root,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return runs_in(root / "runs")[-1][0]


@pytest.mark.parametrize("script", ["plain.py", "workers.py", "mixed.py"])
def test_a_run_comes_out_the_same_whatever_became_of_the_code(project: Path, script: str) -> None:
    index = (project / ".git" / "index").read_bytes()
    path = ran(project, script)
    assert (project / ".git" / "index").read_bytes() == index
    for name in ("net.py", "helper.py", script):
        (project / name).write_text("raise SystemExit('changed since')\n")
    found = replay(path)
    assert (found.num_steps, found.difference, found.reasons) == (8, None, ())
    worktrees = subprocess.run(["git", "worktree", "list"], cwd=project, capture_output=True, text=True, check=True)
    assert len(worktrees.stdout.splitlines()) == 1


def test_a_replay_writes_over_nothing_of_the_users(project: Path) -> None:
    (project / ".gitignore").write_text("data/*.txt\nruns/\n__pycache__/\nlosses.txt\noutputs/\n")
    (project / "outputs").mkdir()
    script = project / "plain.py"
    script.write_text(
        script.read_text().replace(
            "torch.manual_seed(0)",
            "torch.manual_seed(0)\n    import os\n    os.makedirs('outputs', exist_ok=True)\n"
            "    for name in ('losses.txt', 'outputs/log.txt', 'data/cache.txt'):\n"
            "        open(name, 'w').write(os.getcwd())",
            1,
        )
    )
    path = ran(project)
    assert replay(path).difference is None
    for name in ("losses.txt", "outputs/log.txt", "data/cache.txt"):
        assert (project / name).read_text() == str(project)


def test_no_credential_is_kept_and_what_was_left_out_is_named(project: Path) -> None:
    path = ran(project)
    kept = b"".join(p.read_bytes() for p in path.rglob("*") if p.is_file())
    assert b"hf_abcdef" not in kept and b"abc" not in kept.replace(b"abcdef", b"")
    record = read_run(path)
    assert {".env", "config api_key", "--token"} <= {left.name for left in record.left_out}
    assert record.config == {"lr": "0.1"}
    assert (record.outcome, record.num_steps) == ("finished", 12)
    assert {"net.py", "helper.py", "plain.py"} <= set(record.code.sources)
    assert record.code.untracked == ("helper.py",) and record.code.changed == ("net.py",)


@pytest.mark.parametrize(
    ("file", "old", "new", "cause", "says", "step"),
    [
        ("net.py", "Tanh", "ReLU", "code", "'net.py' changed", 0),
        ("helper.py", "0.5", "0.25", "code", "untracked file 'helper.py' changed", 0),
        ("plain.py", "loss.backward()", "(loss if step < 5 else 2 * loss).backward()", "code", "'plain.py' changed", 5),
        ("data/order.txt", "37\n", "111\n", "data order", "of the samples", 0),
    ],
)  # fmt: skip
def test_a_changed_line_or_file_is_named_with_the_first_step_that_differs(
    project: Path, file: str, old: str, new: str, cause: str, says: str, step: int
) -> None:
    path = ran(project)
    text = (project / file).read_text()
    assert old in text
    (project / file).write_text(text.replace(old, new, 1) if file != "data/order.txt" else _rotated(text))
    found = replay(path, is_here=True)
    assert found.difference is not None and found.difference.step == step
    assert found.reasons[0].cause == cause
    assert says in found.reasons[0].says


def _rotated(text: str) -> str:
    """The same samples in another order."""
    lines = text.splitlines(keepends=True)
    return "".join(lines[9:] + lines[:9])


def test_the_commands_say_it_too(project: Path) -> None:
    first = ran(project)
    said = flatout(project, "replay", str(first))
    assert said.returncode == 0 and "EQUAL: 8 steps" in said.stdout
    (project / "helper.py").write_text(textwrap.dedent(HELPER).replace("0.5", "0.25"))
    second = ran(project)
    assert second != first
    said = flatout(project, "replay", str(first), "--here")
    assert said.returncode == 1
    assert "DIFFERENT: step 0" in said.stdout and "likely  code: untracked file 'helper.py' changed" in said.stdout
    said = flatout(project, "runs")
    assert first.name in said.stdout and second.name in said.stdout and "lr=0.1" in said.stdout
    assert "no run" in flatout(project, "runs", "--where", "lr=0.2").stdout
    said = flatout(project, "runs", "diff", str(first), str(second))
    assert "untracked file 'helper.py' changed" in said.stdout and "differ from step 0 on" in said.stdout
    said = flatout(project, "replay", "runs/none")
    assert said.returncode == 2 and "give the folder of a run" in said.stderr and "Traceback" not in said.stderr


def test_an_unchanged_script_is_watched_and_replayed(project: Path) -> None:
    text = (project / "plain.py").read_text().replace("run.tick(loss=loss)", "pass")
    recorded = 'flatout.Run("runs", config={"lr": 0.1, "api_key": "abc"})'
    assert recorded in text
    (project / "quiet.py").write_text("import contextlib\n" + text.replace(recorded, "contextlib.nullcontext()"))
    said = flatout(project, "watch", "quiet.py")
    assert said.returncode == 0, said.stderr
    path, record = runs_in(project / "runs")[-1]
    assert record.num_steps == 12 and record.speed is not None and record.outcome == "finished"
    assert replay(path).difference is None
    (project / "quiet.py").write_text("raise ValueError('broken')\n")
    assert flatout(project, "watch", "quiet.py").returncode == 1
    failed = runs_in(project / "runs")[-1][1]
    assert (failed.outcome, failed.error) == ("failed", "ValueError: broken")


def flatout(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "flatout", *arguments],
        cwd=root,
        env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_another_number_of_threads_is_named(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = project / "plain.py"
    wide = "loss = net(x).square().mean() * torch.randn(1 << 20, generator=torch.Generator().manual_seed(1)).exp().sum() * 1e-6"
    script.write_text(script.read_text().replace("loss = net(x).square().mean()", wide))  # a sum that threads share
    path = ran(project, variables={"OMP_NUM_THREADS": "1"})
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert replay(path).difference is None  # the recorded variables count
    found = replay(path, is_here=True)
    assert found.difference is not None and (found.difference.step, found.difference.what) == (0, "loss")
    assert found.reasons[0].cause == "threads" and "1 -> 2" in found.reasons[0].says


def test_another_version_of_a_package_is_named(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = tmp_path / "site"
    (site / "numbers_lib-1.0.dist-info").mkdir(parents=True)
    (site / "numbers_lib-1.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: numbers-lib\nVersion: 1.0\n"
    )
    (site / "numbers_lib.py").write_text("FACTOR = 1.0\n")
    (project / "helper.py").write_text(
        "import torch\nfrom numbers_lib import FACTOR\n\n"
        "def scale(net):\n    with torch.no_grad():\n        net[0].weight.mul_(FACTOR)\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{site}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    path = ran(project)
    assert replay(path).difference is None
    (site / "numbers_lib-1.0.dist-info").rename(site / "numbers_lib-1.1.dist-info")
    (site / "numbers_lib-1.1.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: numbers-lib\nVersion: 1.1\n"
    )
    (site / "numbers_lib.py").write_text("FACTOR = 1.5\n")
    found = replay(path)
    assert found.difference is not None and found.difference.step == 0
    assert found.reasons[0] == ("package", "numbers-lib: 1.0 -> 1.1")


@pytest.mark.multi
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
    assert not any("TORCHELASTIC" in r.says or "RANK" in r.says for r in changed.reasons)


def test_a_replay_runs_what_was_compiled_then(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hits = tmp_path / "hits"
    (project / "compiled.py").write_text(textwrap.dedent(COMPILED).replace("OUT", repr(str(hits))))
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
