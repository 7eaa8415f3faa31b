from __future__ import annotations

import ast
from typing import Any, Final

import pytest
import torch

from flatout.core.errors import EditError
from flatout.tune.levers.graph.merge_adapter import edit

_TEXT: Final = """import torch
import torch.nn.functional as F
from torch import nn


class LoRA(nn.Module):
    def __init__(self, width, out, rank, alpha):
        super().__init__()
        self.A = nn.Parameter(torch.randn(width, rank))
        self.B = nn.Parameter(torch.randn(rank, out))
        self.alpha = alpha

    def forward(self, x):
        x = self.alpha * (x @ self.A @ self.B)
        return x


class Adapted(nn.Module):
    def __init__(self, linear, rank=4, alpha=8):
        super().__init__()
        self.linear = linear
        self.down = nn.Linear(linear.in_features, rank, bias=False)
        self.up = nn.Linear(rank, linear.out_features, bias=False)
        self.lora_A, self.lora_B = self.down.weight, self.up.weight
        self.scaling = alpha / rank
        self.alpha, self.rank = alpha, rank
        self.lora = LoRA(linear.in_features, linear.out_features, rank, alpha)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x):
        return self.linear(x) + self.scaling * self.up(self.down(x))


def run():
    torch.manual_seed(0)
    net = Adapted(nn.Linear(32, 48))
    net.linear.requires_grad_(False)
    x = torch.randn(6, 20, 32, requires_grad=True)
    y = net(x)
    y.square().mean().backward()
    return y, x.grad, *(p.grad for p in net.parameters() if p.grad is not None)
"""
_LINE: Final = "return self.linear(x) + self.scaling * self.up(self.down(x))"


def _edited(lines: str, code: str | None = None, text: str = _TEXT) -> tuple[str, str]:
    """The text with these lines in forward, and what the lever makes of it at `code`, the last line where that is None."""
    before = text.replace(_LINE, lines.strip().replace("\n", "\n        "))
    code = code or lines.strip().splitlines()[-1].strip()
    return before, edit(before, {"file": "model.py", "function": "Adapted.forward", "code": code})


def _results(text: str) -> tuple[torch.Tensor, ...]:
    scope: dict[str, Any] = {"__name__": "model"}
    exec(compile(text, "model.py", "exec"), scope)
    results: tuple[torch.Tensor, ...] = scope["run"]()
    return results


_OF_MODULES: Final = "lora_linear(x, self.linear, self.down, self.up, scale=self.scaling)"
_FORMS: Final = {
    "modules": (_LINE, _OF_MODULES),
    "the other way round": (
        "return self.up(self.down(x)) * (self.alpha / self.rank) + self.linear(x)",
        "lora_linear(x, self.linear, self.down, self.up, scale=self.alpha / self.rank)",
    ),
    "over several lines": (
        "base = self.linear(x)\nlow = self.down(x)\nlora = self.up(low)\nreturn base + lora * self.scaling",
        _OF_MODULES,
    ),
    "added in place": (
        "result = self.linear(x)\nresult += self.up(self.down(x)) * self.scaling\nreturn result",
        _OF_MODULES,
    ),
    "no scale": (
        "return self.linear(x) + self.up(self.down(x))",
        "lora_linear(x, self.linear, self.down, self.up)",
    ),
    "scaled in between": (
        "return self.linear(x) + self.up(2 * self.down(x) / self.rank)",
        "lora_linear(x, self.linear, self.down, self.up, scale=2 / self.rank)",
    ),
    "weights and a bias": (
        "return F.linear(x, self.linear.weight, self.linear.bias) + (x @ self.lora_A.T @ self.lora_B.t()) * self.scaling",
        "lora_linear(x, self.linear.weight, self.lora_A, self.lora_B, bias=self.linear.bias, scale=self.scaling)",
    ),
    "a module of the file's own": (
        "return self.linear(x) + self.lora(x)",
        "lora_linear(x, self.linear, self.lora.A.T, self.lora.B.T, scale=self.lora.alpha)",
    ),
}


@pytest.mark.parametrize(("lines", "expected"), _FORMS.values(), ids=_FORMS)
def test_layer_and_adapter_become_one_call(lines: str, expected: str) -> None:
    before, after = _edited(lines)
    forward = ast.unparse(ast.parse(after)).split("class Adapted")[1].split("def forward")[1].split("def run")[0]
    assert forward.strip() == f"(self, x):\n        return {expected}"
    assert "from flatout import lora_linear" in after
    for one, other in zip(_results(after), _results(before), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ("return self.linear(x) + self.up(self.down(self.dropout(x)))", "no sum"),
        ("return self.linear(x) + self.up(torch.relu(self.down(x)))", "no sum"),
        ("return self.linear(x + 1) + self.up(self.down(x))", "no sum"),
        ("return self.linear(x) - self.up(self.down(x))", "no sum"),
        ("return self.linear(x)", "no sum"),
        ("y = self.linear(x)\nx = x + 1\nreturn y + self.up(self.down(x))", "no sum|assigned again"),
        ("y = self.linear(x)\nz = y + self.up(self.down(x))\nreturn z + y", "used besides"),
    ],
)
def test_what_is_something_else_is_left_alone(lines: str, says: str) -> None:
    with pytest.raises(EditError, match=says):
        _edited(lines, lines.splitlines()[-2].strip() if says == "used besides" else None)


def test_an_adapter_with_a_bias_is_refused() -> None:
    with pytest.raises(EditError, match="has a bias"):
        _edited(_LINE, text=_TEXT.replace("linear.out_features, bias=False)", "linear.out_features)"))
