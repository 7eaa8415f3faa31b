"""Loops over elements of tensors: which become loops over arrays, bit for bit the same, and which are left."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

import msgspec
import pytest
from tests.evidence_builder import EvidenceBuilder
from tests.lever_tools import edited, ran

from flatout.core.errors import EditError
from flatout.core.records.evidence import LineTime
from flatout.core.records.lever import Candidate, Refusal
from flatout.tune.levers.graph.loop_on_arrays import LEVER

HEADER = "for t in reversed(range(args.num_steps)):"
ADVANTAGES = """
    from types import SimpleNamespace

    import torch

    torch.manual_seed(0)
    args = SimpleNamespace(num_steps=50, gamma=0.99, gae_lambda=0.95)
    rewards, values = torch.randn(50, 2), torch.randn(50, 2)
    dones, next_done = (torch.rand(50, 2) < 0.1).float(), torch.zeros(2)
    next_value = torch.randn(2).reshape(1, -1)
    told = []
    for iteration in range(2):
        with torch.no_grad():
            advantages = torch.zeros_like(rewards)
            lastgaelam = 0
            for t in reversed(range(args.num_steps)):
                if t == args.num_steps - 1:
                    nextnonterminal = 1.0 - next_done
                    nextvalues = next_value
                else:
                    nextnonterminal = 1.0 - dones[t + 1]
                    nextvalues = values[t + 1]
                delta = rewards[t] + args.gamma * nextvalues * nextnonterminal - values[t]
                advantages[t] = lastgaelam = delta + args.gamma * args.gae_lambda * nextnonterminal * lastgaelam
            returns = advantages + values
        told.append(returns.tolist())
"""
RETURNS = """
    import torch

    def discounted(rewards, gamma=0.9):
        n = len(rewards)
        returns = torch.empty(n)
        for i in range(n):
            total = 0.0
            for j in range(i, n):
                total = total + gamma ** (j - i) * rewards[j]
            returns[i] = total
        return returns

    told = discounted(torch.arange(12.0)).tolist()
"""


def on_arrays(text: str, function: str = "<module>", code: str = HEADER) -> str:
    return edited(LEVER, text, file="train.py", function=function, code=code)


def test_advantages_are_summed_up_on_arrays_bit_for_bit() -> None:
    text = on_arrays(ADVANTAGES)
    assert "next_done, next_value, dones, values, rewards, lastgaelam, into=(advantages,)" in text
    assert "advantages_np[t] = lastgaelam_np = delta + args.gamma * args.gae_lambda" in text
    assert ran(text)["told"] == ran(ADVANTAGES)["told"]


def test_a_loop_in_a_loop_and_numbers_of_ranges_stay_as_they_are() -> None:
    text = on_arrays(RETURNS, "discounted", "for i in range(n):")
    assert "with as_arrays(gamma, rewards, into=(returns,)) as (gamma_np, rewards_np, returns_np):" in text
    assert "for j in range(i, n):" in text
    assert ran(text)["told"] == pytest.approx(ran(RETURNS)["told"], rel=1e-6)


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("delta = rewards[t]", "delta = rewards[t].clamp(0)", "is called in the loop"),
        ("returns = advantages + values", "returns = advantages + delta", "'delta' is read after the loop"),
        ("returns = advantages + values", "returns = advantages + lastgaelam", "'lastgaelam' is read after the loop"),
        ("returns = advantages + values", "returns = advantages + t", "'t' is read after the loop"),
        ("delta = rewards[t]", "delta = advantages[t]\n                delta = rewards[t]", "may be overwritten"),
        ("lastgaelam = 0", "pass", "what 'lastgaelam' is before the loop is unknown"),
        ("- values[t]", "- values.shape[0]", "an attribute of 'values'"),
        ("- values[t]", "- sum([1])", "is no arithmetic"),
        ("advantages[t] = lastgaelam", "lastgaelam", "no element of a tensor is written"),
        ("delta = rewards[t]", "args.x = 1\n                delta = rewards[t]", "'args.x' is written in the loop"),
    ],
)
def test_loops_that_do_more_are_left(old: str, new: str, why: str) -> None:
    text = dedent(ADVANTAGES).replace(old, new.replace("\n    ", "\n"))
    assert text != dedent(ADVANTAGES)
    with pytest.raises(EditError, match=why):
        on_arrays(text)


def test_a_loop_over_a_tensor_is_left() -> None:
    text = dedent(ADVANTAGES).replace(HEADER, "for t in torch.arange(50):")
    with pytest.raises(EditError, match="is called in the loop"):
        on_arrays(text, code="for t in torch.arange(50):")


def proposed(folder: Path, seconds: float, *, num_samples: int = 20) -> Candidate | Refusal:
    """Samples found so many seconds of a step of 100 ms on the last line of the loop."""
    path = folder / "train.py"
    path.write_text(dedent(ADVANTAGES))
    lines = path.read_text().splitlines()
    at = {number: line.strip() for number, line in enumerate(lines, 1)}
    last = next(n for n, text in at.items() if text.startswith("advantages[t]"))
    loops = tuple(n for n, text in at.items() if text.startswith("for "))
    run = EvidenceBuilder()
    source = run.line(path.name, last, at[last], function="<module>", loops=loops)
    run.sources[source] = msgspec.structs.replace(run.sources[source], file=str(path))
    run.lines.append(LineTime(source=source, phase="rollout", seconds=seconds, num_samples=num_samples))
    evidence = run.build()
    workload = msgspec.structs.replace(evidence.workload, command=("python", str(path)), cwd=str(folder))
    return next(iter(LEVER.propose(msgspec.structs.replace(evidence, workload=workload), ())))


def test_it_is_proposed_where_samples_find_the_loop(tmp_path: Path) -> None:
    found = proposed(tmp_path, 0.02)
    assert isinstance(found, Candidate)
    assert found.parameters["code"] == HEADER
    assert found.saved_s == pytest.approx((0.01, 0.019))
    assert isinstance(proposed(tmp_path, 0.0005), Refusal)
    assert isinstance(proposed(tmp_path, 0.02, num_samples=3), Refusal)
