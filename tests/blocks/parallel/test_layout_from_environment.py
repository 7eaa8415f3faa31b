"""`flatout run --layout`: the command that it prints and starts, and the example's losses on each layout."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.command_line import flatout

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
LAYOUTS = ROOT / "examples" / "layouts"
SCRIPT = LAYOUTS / "char_gpt.py"


def _losses(text: str) -> list[float]:
    return [float(found) for found in re.findall(r"loss (\d\.\d{4})$", text, re.MULTILINE)]


@pytest.mark.multi
@pytest.mark.long
def test_the_example_trains_the_same_alone_and_laid_out() -> None:
    alone = subprocess.run(
        [sys.executable, str(SCRIPT), "--steps", "10"], capture_output=True, text=True, timeout=110, check=True
    )
    layout = LAYOUTS / "two-stages.toml"
    spread = subprocess.run(
        [sys.executable, "-m", "flatout", "run", "--layout", str(layout), str(SCRIPT), "--", "--steps", "10"],
        capture_output=True,
        text=True,
        timeout=110,
        check=True,
    )
    assert "1 rank(s): 53 gradients agree" in alone.stdout
    assert "2 rank(s): 53 gradients agree" in spread.stdout
    assert _losses(spread.stdout) == pytest.approx(_losses(alone.stdout), abs=2e-4)
    assert len(_losses(alone.stdout)) == 2


def test_the_command_for_several_machines_is_printed_and_not_started(tmp_path: Path) -> None:
    layout = tmp_path / "layout.toml"
    layout.write_text("data = 16\nglobal_batch = 16\nshard = 3\n")
    given = ["run", "--layout", layout, "--nodes", 2, "--coordinator", "first:29500", "--srun", "--print", "train.py"]
    ended = flatout(*given, "--", "--lr", "1")
    assert ended.code == 0
    assert ended.out.startswith("srun --nodes=2 --ntasks-per-node=1 ")
    assert "--nnodes=2 --nproc-per-node=8 --rdzv-backend=c10d --rdzv-endpoint=first:29500" in ended.out
    assert ended.out.rstrip().endswith(f"-m flatout.app.cli.children.layout_rank {layout} script train.py --lr 1")


@pytest.mark.parametrize(
    "options,part",
    [
        (["train.py"], "give a plan or a layout"),
        (["--layout", "layout.toml", "--nodes", "3", "train.py"], "16 ranks of 'layout.toml' cannot be divided over 3"),
        (["--layout", "layout.toml", "--nodes", "2", "train.py"], "give --coordinator HOST:PORT"),
        (["--layout", "wrong.toml", "train.py"], "'wrong.toml' has 'rows'"),
        (["--layout", "none.toml", "train.py"], "cannot read 'none.toml'"),
    ],
)
def test_what_cannot_be_started_is_told(options: list[str], part: str, tmp_path: Path) -> None:
    (tmp_path / "layout.toml").write_text("data = 16\nglobal_batch = 16\n")
    (tmp_path / "wrong.toml").write_text("rows = 16\n")
    ended = flatout("run", *options, folder=tmp_path)
    assert ended.code == 2
    assert part in " ".join(ended.err.split())
