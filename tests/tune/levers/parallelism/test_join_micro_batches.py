"""Micro-batches as one: the text of loops of several kinds, what is learnt with them, and what is left."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

import msgspec
import pytest
import torch
from tests.evidence_builder import EvidenceBuilder
from tests.lever_tools import edited, ran

from flatout.core.errors import EditError
from flatout.core.records.lever import Candidate, Refusal
from flatout.tune.levers.parallelism.join_micro_batches import LEVER

NEXT_ONE_LAST = """
    import contextlib

    import torch
    from torch import nn

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    synchronised, losses = [], []
    is_parallel, parts = True, 4

    def get_batch():
        return torch.randn(5, 6, dtype=torch.float64), torch.randint(3, (5,))

    X, Y = get_batch()
    for step in range(3):
        for micro_step in range(parts):
            if is_parallel:
                model.synchronises = micro_step == parts - 1
            with contextlib.nullcontext():
                logits = model(X)
                loss = nn.functional.cross_entropy(logits, Y)
                loss = loss / parts
            # the next one, early
            X, Y = get_batch()
            loss.backward()
        synchronised.append(model.synchronises)
        optimizer.step()
        optimizer.zero_grad()
    weights = [p.tolist() for p in model.parameters()]
"""
BROUGHT_FIRST = """
    import torch
    from torch import nn

    torch.manual_seed(0)
    model = nn.Linear(6, 3).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = iter([(torch.randn(5, 6), torch.randint(3, (5,))) for _ in range(12)])
    totals = []

    def train(steps, parts):
        for step in range(steps):
            total = 0.0
            for micro_step in range(parts):
                x, y = next(batches)
                x = x.double()
                output = model(x)
                loss = nn.functional.cross_entropy(output, y) / parts
                total += loss.item()
                (2 * loss).backward()
            totals.append(total)
            optimizer.step()
            optimizer.zero_grad()

    train(3, 4)
    weights = [p.tolist() for p in model.parameters()]
"""


def joined(text: str, join: int, **parameters: str) -> str:
    usual = {"function": "<module>", "code": "loss.backward()", "model": "logits = model(X)"}
    return edited(LEVER, text, file="train.py", join=join, **usual | parameters)


def joined_in_function(text: str, join: int) -> str:
    return joined(text, join, function="train", code="(2 * loss).backward()", model="output = model(x)")


@pytest.mark.parametrize("join", [2, 4])
def test_a_batch_that_is_brought_for_the_next_round_is_learnt_from_as_before(join: int) -> None:
    text = joined(NEXT_ONE_LAST, join)
    assert f"for micro_step in range({join - 1}, parts, {join}):" in text
    assert "logits = model(X_joined)" in text and f"(loss * {join}).backward()" in text
    before, after = ran(NEXT_ONE_LAST), ran(text)
    assert after["synchronised"] == before["synchronised"] == [True] * 3
    for one, other in zip(before["weights"], after["weights"], strict=True):
        torch.testing.assert_close(torch.tensor(other), torch.tensor(one), rtol=1e-10, atol=1e-12)
    assert after["X"].tolist() == before["X"].tolist(), "the next batch is the one that it was"


@pytest.mark.parametrize("join", [2, 4])
def test_a_batch_that_is_brought_first_and_a_sum_of_losses(join: int) -> None:
    text = joined_in_function(BROUGHT_FIRST, join)
    assert f"total += (loss * {join}).item()" in text and f"(2 * (loss * {join})).backward()" in text
    before, after = ran(BROUGHT_FIRST), ran(text)
    assert after["totals"] == pytest.approx(before["totals"], rel=1e-10)
    for one, other in zip(before["weights"], after["weights"], strict=True):
        torch.testing.assert_close(torch.tensor(other), torch.tensor(one), rtol=1e-10, atol=1e-12)


def test_a_number_that_does_not_divide_the_micro_batches_is_an_error_and_no_lost_batch() -> None:
    with pytest.raises(ValueError, match="no multiple"):
        ran(joined(NEXT_ONE_LAST, 3))


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("# the next one, early", "step += 0", "is done for each micro-batch"),
        ("# the next one, early", "print(step)", "is done for each micro-batch"),
        ("# the next one, early", "losses.append(loss.item())", "is done for each micro-batch"),
        (
            "optimizer.step()",
            "optimizer.step(); losses.append(logits)",
            "'logits', which the forward computes, is read",
        ),
        ("optimizer.step()", "optimizer.step(); logits = logits + 1", "'logits', which the forward computes, is read"),
        ("X, Y = get_batch()\n        loss", "X, Y = get_batch(), logits\n        loss", "nothing in the loop brings"),
        ("cross_entropy(logits, Y)", "cross_entropy(logits, Y) * micro_step", "'micro_step', the loop's counter"),
        ("in range(parts):", "in range(0, parts):", "and not over a number"),
        ("        logits = model(X)", "        logits = 2 * model(X)", "the model is not called"),
        ("    X, Y = get_batch()\n        loss", "    pass\n        loss", "nothing in the loop brings"),
    ],
)
def test_loops_that_do_more_are_left(old: str, new: str, why: str) -> None:
    text = dedent(NEXT_ONE_LAST)
    changed = "".join(text.rpartition(old)[:1]) + new + text.rpartition(old)[2]
    assert changed != text
    with pytest.raises(EditError, match=why):
        joined(changed, 2)


def proposed(folder: Path, *, calls: float = 4.0, text: str = NEXT_ONE_LAST) -> list[Candidate | Refusal]:
    path = folder / "train.py"
    path.write_text(dedent(text))
    number = {line.strip(): n for n, line in enumerate(path.read_text().splitlines(), 1)}
    steps, parts = number["for step in range(3):"], number["for micro_step in range(parts):"]
    run = EvidenceBuilder()

    def line(code: str, *loops: int) -> int:
        index = run.line(path.name, number[code], code, function="<module>", loops=loops)
        run.sources[index] = msgspec.structs.replace(run.sources[index], file=str(path))
        return index

    run.model(line("logits = model(X)", steps, parts), calls=calls)
    run.backward_at(line("loss.backward()", steps, parts))
    run.optimizer(line("optimizer.step()", steps))
    evidence = run.build()
    workload = msgspec.structs.replace(evidence.workload, command=("python", str(path)), cwd=str(folder))
    return list(LEVER.propose(msgspec.structs.replace(evidence, workload=workload), ()))


def test_all_micro_batches_are_proposed_first_then_fewer(tmp_path: Path) -> None:
    found = proposed(tmp_path)
    assert [c.parameters["join"] for c in found if isinstance(c, Candidate)] == [4, 2]
    assert isinstance(found[0], Candidate) and found[0].saved_s == pytest.approx((0.0, 0.3 * 0.75 * 0.1))
    assert isinstance(proposed(tmp_path, calls=1.0)[0], Refusal)
