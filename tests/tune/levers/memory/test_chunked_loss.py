from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import msgspec
import pytest
import torch
from tests.check.rules.capacity.memory_evidence import part, remembering
from tests.evidence_builder import EvidenceBuilder

from flatout.check.rules.capacity.full_logits import RULE
from flatout.core.errors import EditError
from flatout.core.records.lever import Candidate, Refusal
from flatout.tune.levers.memory.chunked_loss import LEVER, edit

_TEXT: Final = """import torch
import torch.nn as nn
import torch.nn.functional as F


class GPT(nn.Module):
    def __init__(self, vocab=97, width=16):
        super().__init__()
        self.token = nn.Embedding(vocab, width)
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.token.weight

    def forward(self, idx, targets):
        x = self.token(idx).tanh()
        logits = self.head(x)
        loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)
        return loss


def run():
    torch.manual_seed(0)
    net, idx = GPT(), torch.randint(97, (3, 8))
    loss = net(idx, torch.randint(-1, 97, (3, 8)))
    loss.backward()
    return loss.detach(), *(p.grad for p in net.parameters())
"""
_AT: Final = {
    "file": "model.py",
    "function": "GPT.forward",
    "code": "loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)",
}


def _result(text: str) -> tuple[torch.Tensor, ...]:
    scope: dict[str, Any] = {"__name__": "model"}
    exec(compile(text, "model.py", "exec"), scope)
    results: tuple[torch.Tensor, ...] = scope["run"]()
    return results


@pytest.mark.parametrize("device_s", [0.09, None])
def test_on_a_device_it_may_save_what_passes_over_the_logits_take(device_s: float | None, tmp_path: Path) -> None:
    """Seven passes of the loss and its gradient take 7 ms; reading the logits and writing their gradients is two of them."""
    path = tmp_path / "model.py"
    path.write_text(_TEXT)
    run, shape = EvidenceBuilder(device_s=device_s), (4096, 16384)
    number = 1 + _TEXT.splitlines().index(f"        {_AT['code']}")
    line = run.line(str(path), number, _AT["code"], function="GPT.forward")
    for op, phase, others in (
        ("_log_softmax", "forward", 0),
        ("_log_softmax_backward_data", "backward", 1),
        ("nll_loss_backward", "backward", 0),
    ):
        inputs = [shape] * (1 + others)
        run.operator(f"aten.{op}", line, inputs=inputs, output=shape, phase=phase, op_s=1e-3 * (2 + others))
    run.operator("aten.mm", line, inputs=[(4096, 64), (64, 16384)], output=shape, op_s=5e-3, flop=2 * 64 * 4096 * 16384)
    evidence = remembering(
        run, parts=(part("activations", 4 * 4096 * 16384, source=line, example="float32[4096, 16384]"),)
    )
    workload = msgspec.structs.replace(evidence.workload, command=("python", "model.py"), cwd=str(tmp_path))
    sources = tuple(msgspec.structs.replace(source, file=str(path)) for source in evidence.sources)
    evidence = msgspec.structs.replace(evidence, workload=workload, sources=sources)
    [candidate] = LEVER.propose(evidence, list(RULE.check(evidence)))
    assert isinstance(candidate, Candidate)
    assert candidate.saved_s == pytest.approx((0.0, 0.0 if device_s is None else 5e-3))


@pytest.mark.parametrize("bias", [", bias=False", ""])
def test_head_and_loss_become_one_call(bias: str) -> None:
    text = _TEXT.replace(", bias=False", bias)
    after = edit(text, dict(_AT))
    more = "" if bias else ", self.head.bias"
    assert f"loss = linear_cross_entropy(x, self.head.weight, targets{more}, ignore_index=-1)" in after
    assert "from flatout import linear_cross_entropy" in after
    assert "logits" not in after
    for one, other in zip(_result(after), _result(text), strict=True):
        torch.testing.assert_close(one, other)


def test_smoothing_is_kept() -> None:
    smoothed = "ignore_index=-1, label_smoothing=0.1)"
    text = _TEXT.replace("ignore_index=-1)", smoothed)
    after = edit(text, {**_AT, "code": _AT["code"].replace("ignore_index=-1)", smoothed)})
    assert f"linear_cross_entropy(x, self.head.weight, targets, {smoothed}" in after
    for one, other in zip(_result(after), _result(text), strict=True):
        torch.testing.assert_close(one, other)


def test_logits_that_are_returned_too_are_refused() -> None:
    with pytest.raises(EditError, match="'logits' is used besides: return logits, loss"):
        edit(_TEXT.replace("return loss\n", "return logits, loss\n", 1), dict(_AT))


_NEAR: Final = {
    "another head": ("self.head = nn.Linear(width, vocab, bias=False)", "self.head = make(width, vocab)"),
    "weighted": ("ignore_index=-1)", "weight=self.head.weight.sum(1))"),
    "a bias that depends": ("bias=False", "bias=vocab > 3"),
}


@pytest.mark.parametrize(("old", "new"), _NEAR.values(), ids=_NEAR)
def test_other_losses_and_heads_are_refused(old: str, new: str) -> None:
    with pytest.raises(EditError):
        edit(_TEXT.replace(old, new), {**_AT, "code": _AT["code"].replace(old, new)})


def test_a_run_with_small_logits_is_refused() -> None:
    [refusal] = LEVER.propose(EvidenceBuilder().build(), ())
    assert isinstance(refusal, Refusal)
