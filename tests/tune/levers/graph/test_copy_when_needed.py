"""graph.copy-when-needed: a copy of the state is written into the one before."""

from __future__ import annotations

from textwrap import dedent, indent
from typing import Any

import pytest
import torch
from tests.evidence_builder import EvidenceBuilder

from flatout.core.errors import EditError
from flatout.core.records.lever import Refusal
from flatout.tune.levers.graph.copy_when_needed import LEVER, edit

HEAD = '"""A script."""\n\nimport copy\n\nimport torch\n\n\n'
LOOP = """
def train(model, optimizer):
    best = None
    for step in range(6):
        optimizer.zero_grad()
        loss = model(torch.randn(4, 3)).square().sum()
        loss.backward()
        optimizer.step()
        if step % 2 == 0:
            {copy}
        {use}
    model.load_state_dict(best)
    return best
"""
COPIES = {
    "deepcopy": "best = copy.deepcopy(model.state_dict())",
    "clones": "best = {k: v.detach().clone() for k, v in model.state_dict().items()}",
}


def script(copy: str, use: str = "pass") -> str:
    return HEAD + LOOP.format(copy=copy, use=indent(dedent(use), "        ").strip())


def edited(text: str, copy: str) -> str:
    return edit(text, {"file": "a.py", "function": "train", "code": copy})


def trained(text: str) -> dict[str, Any]:
    made: dict[str, Any] = {}
    exec(text, made)
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    best: dict[str, Any] = made["train"](model, torch.optim.SGD(model.parameters(), 0.1))
    return best


@pytest.mark.slow
@pytest.mark.parametrize("name", COPIES)
def test_the_loop_does_the_same(name: str) -> None:
    text = script(COPIES[name])
    new = edited(text, COPIES[name])
    assert "best = copied(model.state_dict(), into=best)" in new
    assert "import copy\n" not in new
    assert '"""A script."""\n\nimport torch' in new
    before, after = trained(text), trained(new)
    assert all(torch.equal(before[k], after[k]) for k in before)


@pytest.mark.parametrize(
    ("use", "why"),
    [
        ("history.append(best)", "may store it"),
        ("last = best", "assigned to|may store it"),
        ("last = best or last", "may store it"),
        ("best = model.state_dict()", "assigned elsewhere"),
        ("keep = lambda: best", "may store it|function of its own"),
    ],
)
def test_a_copy_that_something_else_may_hold_is_left(use: str, why: str) -> None:
    with pytest.raises(EditError, match=why):
        edited(script(COPIES["deepcopy"], use), COPIES["deepcopy"])


@pytest.mark.parametrize(
    "copy",
    [
        "best = copy.deepcopy(model)",
        "self.best = copy.deepcopy(model.state_dict())",
        "best = {k: v for k, v in model.state_dict().items()}",
        "best = {k: v.clone() for k, v in model.state_dict().items() if 'head' in k}",
    ],
)
def test_what_is_no_plain_copy_of_a_state_is_left(copy: str) -> None:
    with pytest.raises(EditError):
        edited(script(copy), copy)


def test_a_run_without_copies_is_refused() -> None:
    [said] = LEVER.propose(EvidenceBuilder().build(), [])
    assert isinstance(said, Refusal)
    assert said.lever == LEVER.id
