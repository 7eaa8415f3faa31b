from __future__ import annotations

import ast
from collections.abc import Callable
from textwrap import dedent
from typing import Any

import pytest
import torch
from tests.evidence_builder import EvidenceBuilder
from tests.lever_tools import found

from flatout.core.errors import EditError
from flatout.core.records.lever import Parameters, Refusal
from flatout.tune.levers.parallelism.batch_modules import LEVER, edit

_HEAD = "import torch\nfrom torch import nn\n\n\n"

CASES = {
    "each with its own column": """
        def forward(self, x):
            parts = [head(column) for head, column in zip(self.heads, x.split(1, dim=1))]
            whole = torch.stack(parts, dim=1)
            return whole.sum(1), whole
        """,
    "all with the same input": """
        def forward(self, x):
            out = []
            for head in self.heads:
                out.append(torch.relu(head(x[:, :1])))
            return torch.stack(out).mean(dim=0)
        """,
    "by their number": """
        def forward(self, x):
            out = []
            for i in range(len(self.heads)):
                out.append(self.heads[i](x[:, i : i + 1]))
            return torch.cat(out, dim=-1)
        """,
    "enumerated and summed": """
        def forward(self, x):
            total = 0
            for i, head in enumerate(self.heads):
                total = total + head(x[:, i].unsqueeze(1))
            return total
        """,
    "columns that were split before": """
        def forward(self, x):
            columns = x.split(1, dim=1)
            return sum(head(column) for head, column in zip(self.heads, columns))
        """,
    "two modules in each": """
        def forward(self, x):
            out = []
            for head, tail in zip(self.heads, self.tails):
                h = torch.tanh(head(x[:, :1]))
                out.append(tail(input=h))
            return torch.stack(out, dim=1)
        """,
}

NEAR_MISSES = {
    "'x' goes from one iteration to the next": """
        def forward(self, x):
            for head in self.heads:
                x = head(x)
            return x
        """,
    "'head' is used for more than a call": """
        def forward(self, x):
            return torch.stack([head(x) * head.weight.sum() for head in self.heads])
        """,
    "no module is called": """
        def forward(self, x):
            return torch.stack([row.sum() for row in x])
        """,
}


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.heads = torch.nn.ModuleList(torch.nn.Linear(1, 4) for _ in range(5)).double()
        self.tails = torch.nn.ModuleList(torch.nn.Linear(4, 2) for _ in range(5)).double()


def _place(text: str) -> Parameters:
    """The loop, or the statement with the comprehension."""
    [function] = [n for n in ast.parse(text).body if isinstance(n, ast.FunctionDef)]
    loops: list[ast.stmt] = [n for n in ast.walk(function) if isinstance(n, ast.For)]
    inside = (ast.ListComp, ast.GeneratorExp)
    loops += [s for s in function.body if any(isinstance(n, inside) for n in ast.walk(s))]
    return {"file": "a.py", "function": "forward", "code": text.splitlines()[loops[0].lineno - 1].strip()}


def _forward(text: str) -> Callable[..., Any]:
    space: dict[str, Any] = {}
    exec(text, space)
    made: Callable[..., Any] = space["forward"]
    return made


def _gradients(text: str) -> tuple[Any, list[torch.Tensor | None]]:
    net = Net()
    x = torch.randn(8, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    out = _forward(text)(net, x)
    (out[0] if isinstance(out, tuple) else out).square().sum().backward()
    return out, [p.grad for p in net.parameters()]


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_at_once_gives_what_they_gave_and_the_same_gradients(name: str) -> None:
    text = _HEAD + dedent(CASES[name]).strip() + "\n"
    changed = edit(text, _place(text))
    assert changed.count("functional_call") >= 1
    torch.testing.assert_close(_gradients(changed), _gradients(text))


@pytest.mark.parametrize("why", NEAR_MISSES)
def test_what_is_not_certain_is_refused(why: str) -> None:
    text = _HEAD + dedent(NEAR_MISSES[why]).strip() + "\n"
    with pytest.raises(EditError) as refusal:
        edit(text, _place(text))
    assert why in str(refusal.value)


def test_buffers_come_along_where_the_file_has_some() -> None:
    text = _HEAD + dedent(CASES["all with the same input"]).strip() + "\n"
    assert "named_parameters" in edit(text, _place(text))
    text += "\n\ndef scaled(net):\n    net.register_buffer('scale', torch.ones(()))\n    return net\n"
    changed = edit(text, {"file": "a.py", "function": "forward", "code": "for head in self.heads:"})
    torch.testing.assert_close(_gradients(changed), _gradients(text))
    assert "state_dict(keep_vars=True)" in changed


def test_files_with_a_batch_norm_are_refused() -> None:
    text = _HEAD + dedent(CASES["all with the same input"]).strip() + "\n# BatchNorm1d\n"
    with pytest.raises(EditError, match="batch norm"):
        edit(text, _place(text))


def test_a_run_without_such_modules_is_refused() -> None:
    [refusal] = LEVER.propose(EvidenceBuilder().build(), [])
    assert isinstance(refusal, Refusal)
    [refusal] = LEVER.propose(EvidenceBuilder().build(), [found(0.02)])
    assert isinstance(refusal, Refusal)
