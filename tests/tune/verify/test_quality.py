"""Changes that may cost accuracy: judged by the user's own metric over whole runs."""

from __future__ import annotations

import re
import textwrap
from functools import partial
from pathlib import Path

import msgspec
import pytest

from flatout.core.errors import UsageError, VerificationError
from flatout.core.records.allowance import Allowance
from flatout.tune.verify.fork_server import ForkServers
from flatout.tune.verify.losses import LossRuns
from flatout.tune.verify.proof import ScriptProver, prove_script
from flatout.tune.verify.proof_terms import ProofTerms
from flatout.tune.verify.quality import Metric, checked
from flatout.tune.verify.side_process import Failed, Request, SideProcess

pytestmark = pytest.mark.usefixtures("forked")

SCRIPT = """
    import time
    import torch
    from torch import nn

    torch.manual_seed(0)
    net = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
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


def terms(metric: Metric, *, num_runs: int = 6) -> ProofTerms:
    return ProofTerms(guarantee="quality", metric=metric, num_runs=num_runs, timeout_s=60.0)


@pytest.mark.slow
@pytest.mark.long
def test_fewer_steps_are_proved_or_different_by_the_metric_and_what_it_may_lose(tmp_path: Path) -> None:
    long, short = script(tmp_path, "a.py", steps=100), script(tmp_path, "b.py", steps=3)
    accuracy = Metric(pattern="accuracy ([0-9.]+)", allowed_loss=Allowance.of(0.9))
    error = Metric(pattern="error ([0-9.]+)", is_cost=True)
    with ScriptProver(long, terms(accuracy)) as prover:
        found = prover.prove(long, short)
        few = prover.prove(long, short, terms(accuracy, num_runs=2))
        strict = prover.prove(long, short, terms(error))
        share = prover.prove(long, short, terms(Metric(pattern=accuracy.pattern, allowed_loss=Allowance.of("50%"))))
    assert (found.outcome, found.equality.guarantee, len(found.seeds)) == ("proved", "quality", 6)
    assert found.speed is not None and found.speed.ratio > 1.5
    assert (few.outcome, few.exit_code) == ("unknown", 3)
    assert "too few runs" in few.because
    assert strict.outcome == "different"
    assert "0 is allowed" in strict.because
    half = re.search(r"([0-9.]+) is allowed", share.equality.because)
    assert half is not None and 0.2 < float(half[1]) <= 0.5


@pytest.mark.slow
def test_a_metric_that_the_script_does_not_print_is_an_error(tmp_path: Path) -> None:
    one = script(tmp_path, "a.py", steps=1)
    with pytest.raises(VerificationError, match="is not in what"):
        prove_script(
            one, one, terms(Metric(pattern="perplexity ([0-9.]+)", allowed_loss=Allowance.of(0.1)), num_runs=1)
        )


@pytest.mark.parametrize(("pattern", "why"), [("accuracy (", "no regular expression"), ("accuracy", "0 groups")])
@pytest.mark.slow
def test_what_is_no_metric_is_refused(pattern: str, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        checked(Metric(pattern=pattern))


def test_the_last_number_counts() -> None:
    metric = Metric(pattern="accuracy ([0-9.]+)", allowed_loss=Allowance.of(0.1))
    assert metric.read("accuracy 0.1\nepoch\naccuracy 0.75 of all\n") == 0.75
    assert metric.read("nothing") is None


LEARNING = """
    import time
    import torch
    from torch import nn

    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr={rate})
    for step in range(400):
        x = torch.randn(64, 8)
        rounded = (x * {steps_of_one}).round() / {steps_of_one}
        for part in {parts}:
            loss = (net(rounded[part]) - x[part].sum(1, keepdim=True)).square().mean() / {num_parts}
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep({pause})
"""
_HALVES = "[slice(0, 32), slice(32, 64)]"


def learning(
    folder: Path,
    name: str,
    *,
    rate: float = 0.05,
    steps_of_one: float = 2**20,
    pause: float = 0.0,
    parts: str = _HALVES,
) -> Request:
    path = folder / name
    num_parts = parts.count("slice")
    text = textwrap.dedent(LEARNING)
    path.write_text(text.format(rate=rate, steps_of_one=steps_of_one, pause=pause, parts=parts, num_parts=num_parts))
    return Request(target=str(path))


@pytest.mark.slow
@pytest.mark.long
def test_without_a_metric_the_first_losses_tell(tmp_path: Path) -> None:
    slow = learning(tmp_path, "slow.py", pause=0.004)
    coarse = learning(tmp_path, "coarse.py", steps_of_one=32)
    lazy = learning(tmp_path, "lazy.py", rate=0.0)
    terms = ProofTerms(guarantee="quality", num_losses=200, budget_s=1.5, num_processes=1, timeout_s=60.0)
    with ScriptProver(slow, terms) as prover:
        found, worse = (prover.prove(slow, one) for one in (coarse, lazy))
        for _ in range(3):  # intervals of 95 % leave out "as fast as itself" in one race of twenty
            late = prover.prove(slow, slow)
            if late.outcome == "unknown":
                break
        once = prover.prove(slow, coarse, msgspec.structs.replace(terms, num_seeds=1))
    assert (found.outcome, found.equality.guarantee, len(found.seeds)) == ("proved", "quality", 3), found.because
    assert found.speed is not None and found.speed.ratio > 1.5
    assert "first 200 losses" in found.equality.because and "over 3 seeds" in found.equality.because
    assert worse.outcome == "different" and "is allowed" in worse.because
    assert late.outcome == "unknown" and "not looked at" in late.equality.because
    assert once.outcome == "proved" and "on one seed" in once.equality.because, once.because


@pytest.mark.slow
def test_of_a_shorter_script_all_losses_are_taken(tmp_path: Path, lasting_servers: ForkServers | None) -> None:
    forked = partial(SideProcess, servers=lasting_servers)
    one, other = learning(tmp_path, "one.py"), learning(tmp_path, "other.py", steps_of_one=32)
    found = LossRuns(forked, timeout_s=60.0).compare(
        one, other, range(1), num_losses=5000, allowed=Allowance.of(1.0), at_once=True
    )
    assert found.holds is True and found.num_steps == 800
    with pytest.raises(Failed, match="did not come to"):
        broken = Request(target=str(tmp_path / "broken.py"))
        Path(broken.target).write_text(Path(one.target).read_text().replace("range(400)", "range(3)"))
        LossRuns(forked, timeout_s=60.0).compare(
            one, broken, [0], num_losses=100, allowed=Allowance.of(1.0), at_once=False
        )
