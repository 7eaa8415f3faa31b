"""Changes that may cost accuracy: judged by the user's own metric over whole runs."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from flatout.errors import UsageError, VerificationError
from flatout.records.verdict import Verdict
from flatout.verification.process import Request
from flatout.verification.proof import Terms, prove
from flatout.verification.quality import Metric, checked

SCRIPT = """
    import time
    import torch
    from torch import nn

    torch.manual_seed(0)
    net = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    x = torch.randn(256, 8)
    y = (x.sum(1, keepdim=True) > 0).float()
    for step in range({steps}):
        loss = nn.functional.binary_cross_entropy_with_logits(net(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(0.002)
        print(f"step {{step}} accuracy 0.1")
    accuracy = ((net(x) > 0) == (y > 0.5)).float().mean().item()
    print(f"accuracy {{accuracy:.4f}} error {{1 - accuracy:.4f}}")
"""


def script(folder: Path, name: str, *, steps: int) -> Request:
    path = folder / name
    path.write_text(textwrap.dedent(SCRIPT).format(steps=steps))
    return Request(target=str(path))


def judged(before: Request, after: Request, metric: Metric, *, num_runs: int = 6) -> Verdict:
    return prove(before, after, Terms(guarantee="quality", metric=metric, num_runs=num_runs, timeout_s=60.0))


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_fewer_steps_are_proved_when_their_loss_is_allowed_and_different_when_not(tmp_path: Path) -> None:
    long, short = script(tmp_path, "a.py", steps=500), script(tmp_path, "b.py", steps=3)
    accuracy = Metric(pattern="accuracy ([0-9.]+)", allowed_loss=0.9)
    found = judged(long, short, accuracy)
    assert (found.outcome, found.equality.guarantee, len(found.seeds)) == ("proved", "quality", 6)
    assert found.speed is not None and found.speed.ratio > 1.5
    strict = Metric(pattern="error ([0-9.]+)", allowed_loss=0.0, is_cost=True)
    found = judged(long, short, strict)
    assert found.outcome == "different"
    assert "0 is allowed" in found.because


@pytest.mark.slow
def test_too_few_runs_tell_nothing(tmp_path: Path) -> None:
    one = script(tmp_path, "a.py", steps=3)
    found = judged(one, one, Metric(pattern="accuracy ([0-9.]+)", allowed_loss=0.9), num_runs=2)
    assert (found.outcome, found.exit_code) == ("unknown", 2)
    assert "too few runs" in found.because


def test_a_metric_that_the_script_does_not_print_is_an_error(tmp_path: Path) -> None:
    one = script(tmp_path, "a.py", steps=1)
    with pytest.raises(VerificationError, match="is not in what"):
        judged(one, one, Metric(pattern="perplexity ([0-9.]+)", allowed_loss=0.1), num_runs=1)


@pytest.mark.parametrize(
    ("pattern", "loss", "why"),
    [("accuracy (", 0.1, "no regular expression"), ("accuracy", 0.1, "0 groups"), ("a (.)", -1.0, "0 or more")],
)
def test_what_is_no_metric_is_refused(pattern: str, loss: float, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        checked(Metric(pattern=pattern, allowed_loss=loss))


def test_the_last_number_counts() -> None:
    metric = Metric(pattern="accuracy ([0-9.]+)", allowed_loss=0.1)
    assert metric.read("accuracy 0.1\nepoch\naccuracy 0.75 of all\n") == 0.75
    assert metric.read("nothing") is None
