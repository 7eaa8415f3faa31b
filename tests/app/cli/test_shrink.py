"""`flatout shrink`: a model of the user's own, each composition in a process of its own, and what is refused before."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tests.command_line import flatout
from torch import nn

from flatout.shrink.compose.saved_model import load_shrunk

pytestmark = pytest.mark.slow

TASK = """\
import torch
from torch import nn


def make():
    torch.manual_seed(0)
    return Net(nn.Linear(8, 96), nn.ReLU(), nn.Linear(96, 4)), (torch.zeros(1, 8),)


class Net(nn.Sequential):
    pass


def coded():
    net, inputs = make()
    net.extra = lambda x: x
    return net, inputs


def score(call):
    return call(torch.ones(40, 8)).isfinite().all(1).float()


def crash(call):
    import os

    os.kill(os.getpid(), 9)
"""


@pytest.fixture
def task(tmp_path: Path) -> Path:
    (tmp_path / "task_of_mine.py").write_text(TASK)
    return tmp_path


@pytest.mark.timeout(300)
@pytest.mark.long
def test_a_model_is_measured_and_the_chosen_one_is_written_with_its_report(task: Path) -> None:
    ended = flatout(
        *(
            "shrink",
            "task_of_mine:make",
            "--metric",
            "task_of_mine:score",
            "--time-budget",
            "1s",
            "--threads",
            "1",
            "-o",
            "out",
        ),
        folder=task,
    )
    assert ended.code in (0, 1), ended.err
    assert "as it is" in ended.out
    report = json.loads((task / "out" / "report.json").read_bytes())
    assert report["points"][0]["metric"] == 1.0
    assert report["selected"] in ended.out
    assert "<svg" in (task / "out" / "report.html").read_text()
    assert {"model.json", "model.safetensors", "how.json"} <= {f.name for f in (task / "out").iterdir()}
    assert "flatout.load_shrunk('out', classes=[task_of_mine.Net]) is called like the model" in ended.out
    found = load_shrunk(task / "out", classes=[type("Net", (nn.Sequential,), {})])
    assert found(torch.zeros(1, 8)).shape == (1, 4)


@pytest.mark.long
def test_a_model_that_only_a_pickle_holds_is_refused_before_anything_is_measured(task: Path) -> None:
    ended = flatout("shrink", "task_of_mine:coded", "--metric", "task_of_mine:score", "-o", "out", folder=task)
    assert ended.code == 2
    assert (
        "the model.extra holds the function coded.<locals>.<lambda>, which cannot be described without a pickle"
        in ended.err
    )
    assert "--allow-pickle" in ended.err
    assert ended.out == ""


def test_a_model_whose_process_dies_is_told(task: Path) -> None:
    ended = flatout("shrink", "task_of_mine:make", "--metric", "task_of_mine:crash", folder=task)
    assert ended.code == 2
    assert "cannot be measured: its process ended by signal 9" in ended.err


def test_a_function_that_is_not_there_is_told(task: Path) -> None:
    ended = flatout("shrink", "task_of_mine:make", "--metric", "task_of_mine:scores", folder=task)
    assert ended.code == 2
    assert "no attribute 'scores'" in ended.err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--objective", "speed"), "none of latency, memory, train-cost"),
        (("--objective", "train-cost"), "give --data and --loss"),
        (("--time-budget", "soon"), "--time-budget soon is no time"),
        (("--accuracy-loss", "some"), "cannot be allowed"),
    ],
)
def test_bad_options_are_refused_before_anything_is_measured(task: Path, options: tuple[str, ...], said: str) -> None:
    ended = flatout("shrink", "task_of_mine:make", "--metric", "task_of_mine:score", *options, folder=task)
    assert ended.code == 2
    assert said in ended.err


def test_a_folder_of_something_else_is_left_alone(task: Path) -> None:
    (task / "mine").mkdir()
    (task / "mine" / "thesis.tex").write_text("x")
    ended = flatout("shrink", "task_of_mine:make", "--metric", "task_of_mine:score", "-o", "mine", folder=task)
    assert ended.code == 2
    assert "holds something else" in ended.err
    assert [f.name for f in (task / "mine").iterdir()] == ["thesis.tex"]
