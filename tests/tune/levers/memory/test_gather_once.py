"""memory.gather-once: a tensor that grows in a loop becomes a list that is joined once."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from tests.evidence_builder import EvidenceBuilder
from tests.lever_tools import found

from flatout.core.errors import EditError
from flatout.core.records.lever import Candidate, Refusal
from flatout.core.records.workload import Source
from flatout.tune.levers.memory.gather_once import LEVER, edit

HEAD = "import numpy as np\nimport torch\n\n\n"


def edited(text: str, code: str, function: str = "f") -> str:
    return edit(HEAD + dedent(text), {"file": "a.py", "function": function, "code": code})


def both(text: str, code: str, *arguments: Any) -> tuple[Any, Any]:
    """What `f` gives before and after the edit; the growth itself must be gone."""
    before: dict[str, Any] = {}
    after: dict[str, Any] = {}
    new = edited(text, code)
    assert code not in new
    exec(HEAD + dedent(text), before)
    exec(new, after)
    return before["f"](*arguments), after["f"](*arguments)


CASES = {
    "a list in the start's stead": (
        """
        def f(x):
            bank = torch.empty(0, 3)
            for row in x:
                bank = torch.cat([bank, row[None] * 2])
            return bank
        """,
        "bank = torch.cat([bank, row[None] * 2])",
    ),
    "read between start and loop": (
        """
        def f(x):
            bank = x[:1]
            width = bank.shape[1]
            for row in x:
                bank = torch.cat((bank, row[None] * width), 0)
            return bank
        """,
        "bank = torch.cat((bank, row[None] * width), 0)",
    ),
    "a state that is read back": (
        """
        def f(x):
            path = x.unsqueeze(1)
            for _ in range(4):
                state = path[:, -1]
                state = state + torch.tanh(state)
                path = torch.cat([path, state.unsqueeze(1)], dim=1)
            return path
        """,
        "path = torch.cat([path, state.unsqueeze(1)], dim=1)",
    ),
    "the last piece read inside the growth": (
        """
        def f(x):
            path = x[None]
            for _ in range(4):
                path = torch.cat([path, path[-1:] + 1], dim=0)
            return path
        """,
        "path = torch.cat([path, path[-1:] + 1], dim=0)",
    ),
    "starts as None, in branches": (
        """
        def f(x):
            all_rows = None
            for row in x:
                rows = row[None]
                if all_rows is None:
                    all_rows = rows
                else:
                    all_rows = torch.cat([all_rows, rows])
            return all_rows
        """,
        "all_rows = torch.cat([all_rows, rows])",
    ),
    "starts as None, in an expression": (
        """
        def f(x):
            kept = None
            for row in x:
                row = row[None]
                kept = row if kept is None else torch.cat([kept, row])
            return kept
        """,
        "kept = row if kept is None else torch.cat([kept, row])",
    ),
    "grown in an inner loop": (
        """
        def f(x):
            bank = torch.empty(0)
            for row in x:
                for value in row:
                    bank = torch.cat([bank, value.view(1), value.view(1) ** 2])
            return bank
        """,
        "bank = torch.cat([bank, value.view(1), value.view(1) ** 2])",
    ),
    "read now and then": (
        """
        def f(x):
            seen = []
            bank = torch.empty(0, 3)
            for i, row in enumerate(x):
                bank = torch.cat([bank, row[None]])
                if i % 2:
                    seen.append(bank.sum())
            return torch.cat([bank.flatten(), torch.stack(seen)])
        """,
        "bank = torch.cat([bank, row[None]])",
    ),
    "returned from the loop": (
        """
        def f(x):
            bank = torch.empty(0, 3)
            for i, row in enumerate(x):
                bank = torch.cat([bank, row[None]])
                if i == 2:
                    return bank
            return bank
        """,
        "bank = torch.cat([bank, row[None]])",
    ),
    "grown at the front": (
        """
        def f(x):
            bank = torch.empty(0, 3)
            for row in x:
                bank = torch.cat([row[None], bank])
            return bank
        """,
        "bank = torch.cat([row[None], bank])",
    ),
    "a parameter that grows": (
        """
        def f(x):
            for i in range(3):
                x = torch.cat([x, torch.full((1, 3), float(i))])
            return x
        """,
        "x = torch.cat([x, torch.full((1, 3), float(i))])",
    ),
    "NumPy's append, flat": (
        """
        def f(x):
            bank = np.array([])
            for row in x.numpy():
                bank = np.append(bank, row)
            return torch.from_numpy(bank)
        """,
        "bank = np.append(bank, row)",
    ),
    "NumPy's append along an axis": (
        """
        def f(x):
            bank = np.zeros((0, 3))
            for row in x.numpy():
                bank = np.append(bank, row[None], 0)
            return torch.from_numpy(bank)
        """,
        "bank = np.append(bank, row[None], 0)",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(("text", "code"), CASES.values(), ids=list(CASES))
def test_the_same_is_gathered(text: str, code: str) -> None:
    x = torch.arange(15, dtype=torch.float32).view(5, 3).cos()
    before, after = both(text, code, x)
    assert before.dtype == after.dtype and torch.equal(before, after)


def test_an_empty_loop_gives_what_it_gave() -> None:
    for case in ("starts as None, in branches", "a list in the start's stead"):
        before, after = both(*CASES[case], torch.empty(0, 3))
        assert before is after is None or torch.equal(before, after)


def test_gradients_are_those_of_the_loop() -> None:
    text, code = CASES["a state that is read back"]
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    before, after = both(text, code, x)
    weights = torch.randn_like(before)
    one, two = (torch.autograd.grad((p * weights).sum(), x)[0] for p in (before, after))
    torch.testing.assert_close(one, two, rtol=1e-12, atol=1e-12)


def test_it_reads_as_a_person_would_write_it() -> None:
    text, code = CASES["a state that is read back"]
    assert edited(text, code) == HEAD + dedent(
        """
        def f(x):
            states = [x]
            for _ in range(4):
                state = states[-1]
                state = state + torch.tanh(state)
                states.append(state)
            path = torch.stack(states, dim=1)
            return path
        """
    )


REFUSED = {
    "read in every iteration": (
        "bank = torch.cat([bank, row[None] + bank.mean()])",
        "def f(x):\n    bank = x\n    for row in x:\n        bank = torch.cat([bank, row[None] + bank.mean()])\n",
        "read in every iteration",
    ),
    "its length read": (
        "x = torch.cat([x, x[:1]])",
        "def f(x):\n    while len(x) < 9:\n        x = torch.cat([x, x[:1]])\n    return x\n",
        "read in every iteration",
    ),
    "written elsewhere": (
        "x = torch.cat([x, y])",
        "def f(x, y):\n    for _ in y:\n        x = torch.cat([x, y])\n        x = x[-5:]\n    return x\n",
        "also written",
    ),
    "a piece changed in place": (
        "x = torch.cat([x, y])",
        "def f(x, y):\n    for _ in range(3):\n        x = torch.cat([x, y])\n        y += 1\n    return x\n",
        "changed in place",
    ),
    "seen by a function inside": (
        "x = torch.cat([x, y])",
        "def f(x, y):\n    g = lambda: x.sum()\n    for _ in range(3):\n        x = torch.cat([x, y])\n        g()\n",
        "other functions",
    ),
    "no loop": ("x = torch.cat([x, y])", "def f(x, y):\n    x = torch.cat([x, y])\n    return x\n", "in no loop"),
    "wanted after an exception": (
        "x = torch.cat([x, y])",
        "def f(x, y):\n    try:\n        for _ in range(3):\n            x = torch.cat([x, y])\n    finally:\n        print(x)\n",
        "after an exception",
    ),
    "another first piece": (
        "x = y if x is None else torch.cat([x, z])",
        "def f(y, z):\n    x = None\n    for _ in y:\n        x = y if x is None else torch.cat([x, z])\n    return x\n",
        "first piece",
    ),
}


@pytest.mark.parametrize(("code", "text", "why"), REFUSED.values(), ids=list(REFUSED))
def test_it_refuses_what_is_not_certain(code: str, text: str, why: str) -> None:
    with pytest.raises(EditError, match=why):
        edited(text, code)


def test_it_offers_itself_where_the_rule_found_it(tmp_path: Path) -> None:
    text, code = CASES["a list in the start's stead"]
    script = tmp_path / "train.py"
    script.write_text(HEAD + dedent(text), encoding="utf-8")
    evidence = EvidenceBuilder().build()
    workload = msgspec.structs.replace(evidence.workload, command=("python", "train.py"), cwd=str(tmp_path))
    evidence = msgspec.structs.replace(evidence, workload=workload)
    line = (HEAD + dedent(text)).splitlines().index(f"        {code}") + 1
    finding = msgspec.structs.replace(found(0.01), where=Source(file=str(script), line=line, function="f"))

    [said] = LEVER.propose(evidence, [finding])
    assert isinstance(said, Candidate)
    assert said.parameters == {"file": "train.py", "function": "f", "code": code}
    [refused] = LEVER.propose(evidence, [])
    assert isinstance(refused, Refusal) and LEVER.edit is edit
    assert np.isclose(said.saved_s[1], 0.01)
