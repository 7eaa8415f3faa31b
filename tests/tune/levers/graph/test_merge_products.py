from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import msgspec
import pytest
import torch
from tests.evidence_builder import EvidenceBuilder

from flatout.core.errors import EditError
from flatout.core.records.finding import Finding
from flatout.core.records.lever import Candidate, Refusal
from flatout.core.records.workload import Source
from flatout.tune.levers.graph.merge_products import LEVER, edit

_TEXT: Final = """import torch
from torch import nn


class Attention(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.to_q = nn.Linear(width, width)
        self.to_k = nn.Linear(width, width)
        self.to_v = nn.Linear(width, width)

    def forward(self, x):
        batch = x.shape[0]
        # queries, keys, values
        q = self.to_q(x).view(batch, -1, 4, 4)
        k = self.to_k(x)
        v = self.to_v(x).tanh()
        return q.flatten(2) + k * v


def run():
    torch.manual_seed(0)
    net = Attention()
    net(torch.randn(3, 5, 16)).square().sum().backward()
    return net(torch.randn(3, 5, 16)), *(p.grad for p in net.parameters())
"""
_AT: Final = {"file": "model.py", "function": "Attention.forward", "code": "k = self.to_k(x)"}


def _result(text: str) -> tuple[torch.Tensor, ...]:
    scope: dict[str, Any] = {"__name__": "model"}
    exec(compile(text, "model.py", "exec"), scope)
    results: tuple[torch.Tensor, ...] = scope["run"]()
    return results


def test_three_layers_of_one_input_become_one_product() -> None:
    after = edit(_TEXT, dict(_AT))
    assert (
        """        # queries, keys, values
        q, k, v = nn.functional.linear(
            x,
            torch.cat([self.to_q.weight, self.to_k.weight, self.to_v.weight]),
            torch.cat([self.to_q.bias, self.to_k.bias, self.to_v.bias]),
        ).chunk(3, dim=-1)
        q = q.view(batch, -1, 4, 4)
        v = v.tanh()
"""
        in after
    )
    for one, other in zip(_result(after), _result(_TEXT), strict=True):
        torch.testing.assert_close(one, other)


def test_different_widths_and_one_expression_are_split() -> None:
    text = _TEXT.replace("self.to_v = nn.Linear(width, width)", "self.to_v = nn.Linear(width, 1, bias=True)")
    lines = (
        text.split("        # queries")[0]
        + "        return torch.sigmoid(self.to_q(x)) * self.to_k(x) + self.to_v(x)\n"
    )
    text = lines + "\n\ndef run" + text.split("\n\ndef run")[1]
    code = "return torch.sigmoid(self.to_q(x)) * self.to_k(x) + self.to_v(x)"
    after = edit(text, {**_AT, "code": code})
    assert ".split([self.to_q.out_features, self.to_k.out_features, self.to_v.out_features], dim=-1)" in after
    assert "return torch.sigmoid(to_q) * to_k + to_v" in after
    for one, other in zip(_result(after), _result(text), strict=True):
        torch.testing.assert_close(one, other)


_NEAR: Final = {
    "another input": ("self.to_q(x).view", "self.to_q(x + 1).view", 2),
    "changed input": ("        v = self.to_v(x)", "        x = x + 1\n        v = self.to_v(x)", 2),
}


@pytest.mark.parametrize(("old", "new", "num"), _NEAR.values(), ids=_NEAR)
def test_layers_of_another_input_are_left_alone(old: str, new: str, num: int) -> None:
    text = _TEXT.replace(old, new)
    after = edit(text, dict(_AT))
    assert f".chunk({num}, dim=-1)" in after
    for one, other in zip(_result(after), _result(text), strict=True):
        torch.testing.assert_close(one, other)


def test_a_layer_without_bias_among_others_is_refused() -> None:
    with pytest.raises(EditError, match="some have none"):
        edit(
            _TEXT.replace("self.to_k = nn.Linear(width, width)", "self.to_k = nn.Linear(width, width, bias=False)"),
            dict(_AT),
        )


def test_a_layer_that_may_be_something_else_is_refused() -> None:
    with pytest.raises(EditError, match="no call of an nn"):
        edit(_TEXT.replace("self.to_k = nn.Linear(width, width)", "self.to_k = make(width)"), dict(_AT))


def _offers(folder: Path, *, width: int, saved_s: float) -> list[Candidate | Refusal]:
    script = folder / "train.py"
    script.write_text(_TEXT)
    number = next(i for i, line in enumerate(_TEXT.splitlines(), 1) if "self.to_k(x)" in line)
    run = EvidenceBuilder()
    line = run.line("train.py", number, "k = self.to_k(x)", function="Attention.forward")
    rows = [
        run.operator(
            "aten.addmm", line, inputs=[(width,), (64, width), (width, width)], output=(64, width), calls=3, op_s=0.01
        )
    ]
    evidence = run.build()
    workload = msgspec.structs.replace(evidence.workload, command=("python", str(script)), cwd=str(folder))
    finding = Finding(
        rule="overhead.split-linears",
        regime="overhead",
        where=Source(file=str(script), line=number, function="Attention.forward"),
        cost_s=0.03,
        saved_s=(0.8 * saved_s, saved_s),
        because="three layers",
        edit="one layer",
        operators=tuple(rows),
    )
    return list(LEVER.propose(msgspec.structs.replace(evidence, workload=workload), (finding,)))


def test_the_cost_of_putting_weights_together_is_taken_off(tmp_path: Path) -> None:
    [candidate] = _offers(tmp_path, width=16, saved_s=0.01)
    assert isinstance(candidate, Candidate)
    assert candidate.saved_s[1] < 0.01


def test_large_weights_for_a_small_saving_are_refused(tmp_path: Path) -> None:
    [refusal] = _offers(tmp_path, width=4096, saved_s=0.001)
    assert isinstance(refusal, Refusal)
    assert "putting the weights together" in refusal.because
