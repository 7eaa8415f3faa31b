from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import pytest
import torch
from tests.evidence_builder import EvidenceBuilder

from flatout.core.errors import EditError
from flatout.core.records.lever import Refusal
from flatout.tune.levers.memory.fusion import LEVER, edit

_HEAD: Final = """import math
import torch
import torch.nn.functional as F
from torch import nn


"""
_MODULE: Final = """class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(16))
        self.bias = nn.Parameter(torch.rand(16))
        self.eps = 1e-3

    def forward(self, x):
"""
_RUN: Final = """

def run():
    torch.manual_seed(0)
    return Net()(torch.randn(3, 5, 16))
"""
_LOSS: Final = """def loss_of(logits, targets):
"""
_RUN_LOSS: Final = """

def run():
    torch.manual_seed(0)
    return loss_of(torch.randn(7, 11), torch.randint(11, (7,)))
"""


class Case(NamedTuple):
    """Lines of a function, the line that is slow, and what stands there afterwards (all of it, but for `stays`)."""

    lines: str
    code: str
    after: str
    is_loss: bool = False


CASES: Final = {
    "layer norm": Case(
        """mean = x.mean(dim=-1, keepdim=True)
variance = ((x - mean) ** 2).mean(dim=-1, keepdim=True)
return (x - mean) / torch.sqrt(variance + self.eps) * self.weight + self.bias""",
        "mean = x.mean(dim=-1, keepdim=True)",
        "return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)",
    ),
    "layer norm by var": Case(
        """u = x.mean(-1, keepdim=True)
s = x.var(-1, keepdim=True, unbiased=False)
x = (x - u) * torch.rsqrt(s + 1e-5)
return self.weight * x + self.bias""",
        "x = (x - u) * torch.rsqrt(s + 1e-5)",
        "return F.layer_norm(x, self.weight.shape, self.weight, self.bias)",
    ),
    "layer norm of the centred": Case(
        """centred = x - torch.mean(x, dim=-1, keepdim=True)
var = torch.mean(centred * centred, dim=-1, keepdim=True)
normed = centred / (var + 1e-6).sqrt()
return normed.tanh()""",
        "var = torch.mean(centred * centred, dim=-1, keepdim=True)",
        "normed = F.layer_norm(x, x.shape[-1:], eps=1e-6)\nreturn normed.tanh()",
    ),
    "rms norm": Case(
        """input_dtype = x.dtype
x = x.to(torch.float64)
variance = x.pow(2).mean(-1, keepdim=True)
x = x * torch.rsqrt(variance + self.eps)
return self.weight * x.to(input_dtype)""",
        "variance = x.pow(2).mean(-1, keepdim=True)",
        "return F.rms_norm(x, self.weight.shape, self.weight, self.eps)",
    ),
    "rms norm in one line": Case(
        """return x / torch.sqrt(torch.mean(x * x, dim=-1, keepdim=True) + 1e-6) * self.weight""",
        "return x / torch.sqrt(torch.mean(x * x, dim=-1, keepdim=True) + 1e-6) * self.weight",
        "return F.rms_norm(x, self.weight.shape, self.weight, 1e-6)",
    ),
    "softmax": Case(
        """shifted = x - x.max(dim=-1, keepdim=True).values
powers = shifted.exp()
return powers / powers.sum(dim=-1, keepdim=True)""",
        "powers = shifted.exp()",
        "return F.softmax(x, dim=-1)",
    ),
    "gelu by tanh": Case(
        """inner = math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))
return 0.5 * x * (1.0 + torch.tanh(inner))""",
        "inner = math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))",
        'return F.gelu(x, approximate="tanh")',
    ),
    "gelu by cubes": Case(
        "return x / 2 * (torch.tanh(0.7978845608 * (x + 0.044715 * x * x * x)) + 1)",
        "return x / 2 * (torch.tanh(0.7978845608 * (x + 0.044715 * x * x * x)) + 1)",
        'return F.gelu(x, approximate="tanh")',
    ),
    "gelu by erf": Case(
        "return x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))",
        "return x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))",
        "return F.gelu(x)",
    ),
    "silu": Case(
        "gate = torch.sigmoid(x)\nreturn x * gate",
        "return x * gate",
        "return F.silu(x)",
    ),
    "gathered": Case(
        """logp = F.log_softmax(logits, dim=-1)
picked = logp.gather(1, targets.unsqueeze(1)).squeeze(1)
loss = -picked.mean()
return loss""",
        "logp = F.log_softmax(logits, dim=-1)",
        "loss = F.cross_entropy(logits, targets)\nreturn loss",
        is_loss=True,
    ),
    "indexed": Case(
        """logp = logits.log_softmax(1)
return (-logp[torch.arange(len(targets)), targets]).mean()""",
        "logp = logits.log_softmax(1)",
        "return F.cross_entropy(logits, targets)",
        is_loss=True,
    ),
    "one-hot": Case(
        """rows = F.one_hot(targets, num_classes=11)
return -(rows * torch.log_softmax(logits, dim=1)).sum(dim=1).mean()""",
        "rows = F.one_hot(targets, num_classes=11)",
        "return F.cross_entropy(logits, targets)",
        is_loss=True,
    ),
}


def _text(case: Case, lines: str) -> str:
    head, depth, tail = (_LOSS, 4, _RUN_LOSS) if case.is_loss else (_MODULE, 8, _RUN)
    return _HEAD + head + "".join(f"{' ' * depth}{line}\n" for line in lines.splitlines()) + tail


def _edited(case: Case, text: str, code: str = "") -> str:
    function = "loss_of" if case.is_loss else "Net.forward"
    return edit(text, {"file": "model.py", "function": function, "code": code or case.code})


def _result(text: str) -> Any:
    scope: dict[str, Any] = {"__name__": "model"}
    exec(compile(text, "model.py", "exec"), scope)
    run: Callable[[], torch.Tensor] = scope["run"]
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        return run().detach()
    finally:
        torch.set_default_dtype(before)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_formula_becomes_one_call_that_computes_the_same(case: Case) -> None:
    before, wanted = _text(case, case.lines), _text(case, case.after)
    after = _edited(case, before)
    assert after.replace("import math\n", "") == wanted.replace("import math\n", "")
    torch.testing.assert_close(_result(after), _result(before), rtol=1e-6, atol=1e-9)


_NEAR: Final = {
    "over n - 1": ("layer norm by var", ", unbiased=False", ""),
    "another dimension": ("layer norm", "x.mean(dim=-1", "x.mean(dim=1"),
    "no formula's constant": ("gelu by tanh", "0.044715", "0.05"),
    "quick gelu": ("silu", "torch.sigmoid(x)", "torch.sigmoid(1.702 * x)"),
    "another sum": ("softmax", "powers.sum(dim=-1", "powers.abs().sum(dim=-1"),
    "a sum of losses": ("gathered", "picked.mean()", "picked.sum()"),
}


@pytest.mark.parametrize(("name", "old", "new"), _NEAR.values(), ids=_NEAR)
def test_what_only_looks_alike_is_refused(name: str, old: str, new: str) -> None:
    case = CASES[name]
    assert old in case.lines
    code = case.code.replace(old, new)
    with pytest.raises(EditError, match="no formula"):
        _edited(case, _text(case, case.lines.replace(old, new)), code)


def test_a_part_that_is_used_besides_is_refused() -> None:
    case = CASES["layer norm"]
    text = _text(case, case.lines.replace("return (", "self.seen = mean\nreturn ("))
    with pytest.raises(EditError, match="'mean' is used besides"):
        _edited(case, text)


def test_a_run_without_such_chains_is_refused() -> None:
    [refusal] = LEVER.propose(EvidenceBuilder().build(), ())
    assert isinstance(refusal, Refusal)
