"""graph.check-the-norm: one norm tells whether the search for NaN is needed."""

from __future__ import annotations

from textwrap import dedent
from typing import Any

import pytest
import torch
from tests.evidence_builder import EvidenceBuilder

from flatout.core.errors import EditError
from flatout.core.records.lever import Refusal
from flatout.tune.levers.graph.check_the_norm import LEVER, edit

HEAD = "import torch\n\n\n"
CASES = {
    "raises with the name": (
        """
        def f(model):
            for name, p in model.named_parameters():
                if torch.isnan(p.grad).any() or torch.isinf(p.grad).any():
                    raise FloatingPointError(name)
            return "fine"
        """,
        "for name, p in model.named_parameters():",
    ),
    "sets a flag, skips what has no gradient": (
        """
        def f(model):
            bad = False
            for p in model.parameters():
                if p.grad is None:
                    continue
                if not torch.isfinite(p.grad).all():
                    bad = True
                    break
            return bad
        """,
        "for p in model.parameters():",
    ),
    "a guard around, a name for the gradient, two tensors": (
        """
        def f(model):
            names = []
            for name, p in model.named_parameters():
                if p.grad is not None:
                    g = p.grad
                    if g.isnan().any().item() or p.isnan().any():
                        names.append(name)
            return names
        """,
        "for name, p in model.named_parameters():",
    ),
    "asserts": (
        """
        def f(model):
            for p in model.parameters():
                assert torch.isfinite(p.grad).all(), "bad"
            return "fine"
        """,
        "for p in model.parameters():",
    ),
    "any": (
        """
        def f(model):
            if any(torch.isnan(p.grad).any() for p in model.parameters() if p.grad is not None):
                return "skipped"
            return "stepped"
        """,
        "if any(torch.isnan(p.grad).any() for p in model.parameters() if p.grad is not None):",
    ),
    "all": (
        """
        def f(model):
            ok = all(torch.isfinite(p.grad).all() for p in model.parameters())
            return bool(ok)
        """,
        "ok = all(torch.isfinite(p.grad).all() for p in model.parameters())",
    ),
}


def outcome(text: str, bad: float | None) -> Any:
    """What `f` says of gradients that hold this number in one place."""
    made: dict[str, Any] = {}
    exec(HEAD + dedent(text) if not text.startswith("import") else text, made)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
    model(torch.randn(4, 2)).sum().backward()
    if bad is not None:
        gradient = model[1].weight.grad
        assert isinstance(gradient, torch.Tensor)
        gradient[0, 1] = bad
    try:
        return made["f"](model)
    except (FloatingPointError, AssertionError) as e:
        return type(e), str(e)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("bad", [None, 3e38, float("nan"), float("inf")])
def test_the_outcome_is_the_same(name: str, bad: float | None) -> None:
    text, code = CASES[name]
    new = edit(HEAD + dedent(text), {"file": "a.py", "function": "f", "code": code})
    assert "get_total_norm" in new
    assert outcome(new, bad) == outcome(text, bad)


REFUSED = {
    "does something else": "for p in model.parameters():\n        total += 1\n        assert torch.isfinite(p.grad).all()",
    "in one test": "for p in model.parameters():\n        if p is not None and torch.isnan(p).any():\n            raise OSError",
    "no check": "for p in model.parameters():\n        if p.grad.sum() > 3:\n            raise ValueError",
    "generator": "for p in given:\n        assert torch.isfinite(p).all()",
    "outside the loop": "for p in model.parameters():\n        assert torch.isfinite(p.grad).all()\n    print(p)",
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_is_no_search_alone_is_left(why: str) -> None:
    text = f"{HEAD}def f(model, given):\n    total = 0\n    {REFUSED[why]}\n"
    code = REFUSED[why].splitlines()[0]
    with pytest.raises(EditError, match="also does" if why == "does something else" else why):
        edit(text, {"file": "a.py", "function": "f", "code": code})


def test_a_run_without_checks_is_refused() -> None:
    [said] = LEVER.propose(EvidenceBuilder().build(), [])
    assert isinstance(said, Refusal)
