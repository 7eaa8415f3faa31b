"""`flatout check` on whole scripts, in processes of their own: as a user meets it."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

Check = Callable[..., Any]

LOOP = """
    import torch
    from torch import nn
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    for step in range(30):
        loss = net(torch.randn(64, 16)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""


def plus(text: str) -> str:
    return textwrap.dedent(LOOP) + textwrap.dedent(text)


@pytest.mark.long
def test_a_script_runs_as_under_python_to_the_last_bit(check: Check, tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("VALUE = 7\n")
    script = plus("""
        import argparse, hashlib, os, sys
        import beside
        import __main__
        parser = argparse.ArgumentParser()
        parser.add_argument("--lr", type=float)
        args = parser.parse_args()
        print("name", __name__, "lr", args.lr, "beside", beside.VALUE, "argv0", sys.argv[0], "main", __main__.net is net)
        print("cwd", os.getcwd(), "file", __file__)
        print("hash", hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in net.parameters())).hexdigest())
        print("next", torch.rand(1).item())
        """)
    ran = check(script, arguments=("--", "--lr", "0.5"))
    plain = subprocess.run(
        [sys.executable, "train.py", "--lr", "0.5"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
        env={"OMP_NUM_THREADS": "1"},
    )

    assert ran.code == 0, ran.err
    assert "name __main__ lr 0.5 beside 7 argv0 train.py main True" in ran.out
    assert "a training step" in ran.out
    lines = plain.stdout.splitlines()
    assert len(lines) == 4
    for line in lines:
        assert line in ran.out


def test_a_module_runs_like_python_m_with_its_exit_code(check: Check, tmp_path: Path) -> None:
    package = tmp_path / "app"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "net.py").write_text("WIDTH = 32\n")
    (package / "train.py").write_text(
        plus("""
        from .net import WIDTH
        import sys
        print("width", WIDTH, "package", __package__, sys.argv[1:])
        sys.exit(3)
        """)
    )

    ran = check(None, "--no-trials", "-m", "app.train", arguments=("--flag",))

    assert ran.code == 3, ran.err
    assert ran.report is not None and not ran.report["evidence"]["trials"]
    assert "width 32 package app ['--flag']" in ran.out
    assert "a training step" in ran.out


def test_a_missing_script_is_one_clear_line(check: Check) -> None:
    ran = check(None, name="no_such.py")

    assert ran.code == 2
    assert "'no_such.py' is not a file" in ran.err
    assert "Traceback" not in ran.err


def test_a_script_that_does_not_compile_is_one_clear_line(check: Check) -> None:
    ran = check("for x in:\n    pass\n")

    assert ran.code == 2
    assert "does not compile" in ran.err
    assert "Traceback" not in ran.err


def test_a_script_that_never_trains_says_so(check: Check) -> None:
    ran = check("print('hello')")

    assert "hello" in ran.out
    assert "No step was seen" in ran.out
    assert ran.code == 3


@pytest.mark.long
def test_a_script_that_fails_after_few_steps_fails_as_its_own_with_a_report_of_what_was_seen(check: Check) -> None:
    ran = check(plus("raise RuntimeError('disk full')").replace("range(30)", "range(6)"))

    assert ran.code == 1
    assert "RuntimeError: disk full" in ran.err
    assert "flatout" not in ran.err.split("Traceback")[1].split("RuntimeError")[0]
    assert "a training step" in ran.out
    assert ran.report is not None
    evidence = ran.report["evidence"]
    assert evidence["exit"] == "RuntimeError: disk full"
    assert evidence["steps"]["num_observed"] < 10
    assert evidence["steps"]["num_timed"] > 0
    assert any("few" in note for note in evidence["notes"])


@pytest.mark.long
def test_a_script_that_catches_everything_can_still_be_stopped(check: Check) -> None:
    ran = check(
        """
        import torch
        from torch import nn
        net = nn.Linear(16, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
        step = 0
        while True:
            try:
                step += 1
                net(torch.randn(64, 16)).mean().backward()
                optimizer.step()
            except BaseException:
                pass
        """,
        "--no-trials",
        "--seconds",
        "0.5",
    )

    assert "a training step" in ran.out


@pytest.mark.long
def test_a_loader_with_workers_gives_the_line_inside_the_worker(check: Check) -> None:
    ran = check(
        """
        import torch
        from torch import nn
        from torch.utils.data import DataLoader, Dataset

        class Slow(Dataset):
            def __len__(self):
                return 400
            def __getitem__(self, i):
                total = 0.0
                for k in range(30000):
                    total += (i * k) % 7  # busy
                return torch.full((16,), total)

        if __name__ == "__main__":
            net = nn.Linear(16, 1)
            optimizer = torch.optim.SGD(net.parameters(), lr=1e-9)
            for x in DataLoader(Slow(), batch_size=8, num_workers=1):
                net(x).mean().backward()
                optimizer.step()
        """
    )

    assert ran.code == 0, ran.err
    assert ran.report is not None
    first = ran.report["findings"][0]
    assert first["rule"] == "input.slow-loader"
    assert first["text"].endswith("# busy") or first["text"].startswith("for k")


@pytest.mark.long
def test_a_script_whose_steps_run_in_child_processes_says_where_to_look(check: Check) -> None:
    ran = check(
        """
        import torch
        import torch.multiprocessing as mp
        from torch import nn

        def train(rank):
            net = nn.Linear(4, 1)
            for _ in range(5):
                net(torch.randn(2, 4)).mean().backward()
                with torch.no_grad():
                    net.weight -= 0.1 * net.weight.grad

        if __name__ == "__main__":
            mp.spawn(train, nprocs=1)
        """
    )

    assert "No step was seen" in ran.out
    assert ran.report is not None
    assert any("process" in note for note in ran.report["evidence"]["notes"])


def test_json_into_a_missing_folder_is_refused_before_the_script_runs(check: Check, tmp_path: Path) -> None:
    ran = check(plus("print('ran')"), "--json", str(tmp_path / "nowhere" / "x.json"))

    assert ran.code == 2
    assert "there is no folder" in ran.err
    assert "ran" not in ran.out
