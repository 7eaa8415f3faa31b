from __future__ import annotations

import math
from textwrap import indent
from typing import Any

import pytest
import torch
from tests.evidence_builder import EvidenceBuilder

from flatout.core.errors import EditError
from flatout.core.records.lever import Refusal
from flatout.tune.levers.graph.defer_host_read import LEVER, edit

_SCRIPT = """\
import torch
import torch.nn.functional as F


def main():
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
{before}    for step in range(1, 8):
        x, y = torch.randn(16, 8), torch.randint(4, (16,))
        output = model(x)
        loss = F.cross_entropy(output, y)
        optimizer.zero_grad()
        loss.backward()
{inside}        optimizer.step()
{after}    return seen
"""


def _script(before: str, inside: str, after: str) -> str:
    return _SCRIPT.format(before=indent(before, " " * 4), inside=indent(inside, " " * 8), after=indent(after, " " * 4))


def _seen(text: str) -> list[Any]:
    names: dict[str, Any] = {}
    exec(text, names)
    seen: list[Any] = names["main"]()
    return seen


def _changed(text: str, code: str) -> str:
    return edit(text, {"file": "train.py", "function": "main", "code": code})


_RUNNING = "running = loss.item() if running is None else 0.95 * running + 0.05 * loss.item()"
_NORMS = "norms = {name: weight.grad.norm().item() for name, weight in model.named_parameters()}"
CASES = {
    "sum": (
        "total = 0.0\n",
        "total += loss.item()\n",
        "seen.append(total / 7)\n",
        "total += loss.item()",
        ["total += loss.detach()\n", "float(total) / 7"],
    ),
    "sum read now and then, and set to zero": (
        "total = 0.0\n",
        "total += loss.item()\nif step % 3 == 0:\n    seen.append(f'{total / 3:.3f}')\n    total = 0.0\n",
        "",
        "total += loss.item()",
        ["total += loss.detach()\n", "{float(total) / 3:.3f}"],
    ),
    "running mean": (
        "running = None\n",
        f"{_RUNNING}\nif step % 2 == 0:\n    seen.append(running)\n",
        "seen.append(running)\n",
        _RUNNING,
        ["loss.detach() if running is None else 0.95 * running + 0.05 * loss.detach()", "append(float(running))"],
    ),
    "last": (
        "",
        "value = loss.item()\n",
        "seen.append(value)\n",
        "value = loss.item()",
        ["value = loss.detach()\n", "append(value.item())"],
    ),
    "by another name": (
        "total, num = 0.0, 0\n",
        "value = loss.item()\ntotal = total + value * len(x)\nnum += len(x)\n",
        "seen.append(total / num)\n",
        "value = loss.item()",
        ["total = total + value * len(x)\n", "float(total) / num"],
    ),
    "list": (
        "losses = []\n",
        "losses.append(loss.item())\n",
        "seen += [sum(losses) / len(losses), losses[-1], *losses[-2:]]\n",
        "losses.append(loss.item())",
        [
            "losses.append(loss.detach().clone())",
            "sum([value.item() for value in losses]) / len(losses), losses[-1].item()",
        ],
    ),
    "float": (
        "losses = []\n",
        "losses.append(float(loss))\nif step % 4 == 0:\n    seen.append(max(losses))\n",
        "",
        "losses.append(float(loss))",
        ["max([value.item() for value in losses])"],
    ),
    "count": (
        "right = 0\n",
        "right += (output.argmax(1) == y).sum().item()\n",
        "seen.append(right)\n",
        "right += (output.argmax(1) == y).sum().item()",
        ["right += (output.argmax(1) == y).sum()\n", "append(int(right))"],
    ),
    "dictionary": (
        "",
        f"{_NORMS}\nif step % 3 == 0:\n    seen += [max(norms, key=lambda name: norms[name]), norms['bias']]\n",
        "",
        _NORMS,
        [
            "norms = {name: weight.grad.norm() for name",
            "            norms = {key: value.item() for key, value in norms.items()}\n",
        ],
    ),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad:UserWarning")
@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_what_is_read_late_is_what_was_read_at_once(case: tuple[str, str, str, str, list[str]]) -> None:
    before, inside, after, code, expected = case
    text = _script(before, inside, after)
    changed = _changed(text, code)
    assert all(part in changed for part in expected), changed
    inner = changed[changed.index("for step") : changed.index("optimizer.step()")]
    assert ".item()" not in inner.split("if step %")[0]
    was, now = _seen(text), _seen(changed)
    assert [type(v) for v in was] == [type(v) for v in now]
    for a, b in zip(was, now, strict=True):
        assert math.isclose(a, b, rel_tol=1e-6) if isinstance(a, float) else a == b


REFUSED = {
    "early stopping": (
        "",
        "value = loss.item()\nif value < 0.1:\n    break\n",
        "",
        "value = loss.item()",
        "every step",
    ),
    "another function": ("", "print(step, loss.item())\n", "", "print(step, loss.item())", "every step"),
    "a scheduler": ("", "value = loss.item()\nprint(value)\n", "", "value = loss.item()", "every step"),
    "an attribute": ("", "model.loss = loss.item()\n", "", "model.loss = loss.item()", "others may see"),
    "in place": (
        "total = torch.zeros(())\nlosses = []\n",
        "total += loss.detach()\nlosses.append(total.item())\n",
        "",
        "losses.append(total.item())",
        "in place",
    ),
    "a weight": ("ws = []\n", "ws.append(model.bias.item())\n", "", "ws.append(model.bias.item())", "may be changed"),
    "a list with more": (
        "losses = [1.0]\n",
        "losses.append(loss.item())\n",
        "print(losses)\n",
        "losses.append(loss.item())",
        "begins empty",
    ),
    "inside a function": (
        "last = 0.0\ndef show():\n    print(last)\n",
        "last = loss.item()\n",
        "show()\n",
        "last = loss.item()",
        "before the loop",
    ),
    "whole or not": ("n = 0\n", "n += output.sum().item()\n", "print(n)\n", "n += output.sum().item()", "whole"),
    "a condition": ("", "if loss.item() > 9:\n    break\n", "", "if loss.item() > 9:", "steers"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", REFUSED.values(), ids=list(REFUSED))
def test_what_is_needed_at_once_is_left(case: tuple[str, str, str, str, str]) -> None:
    before, inside, after, code, because = case
    with pytest.raises(EditError, match=because):
        _changed(_script(before, inside, after), code)


def test_a_wait_goes_unless_times_are_taken_around_it() -> None:
    text = _script("", "torch.cuda.synchronize()\n", "")
    assert _changed(text, "torch.cuda.synchronize()") == _script("", "", "")
    timed = _script("import time\n", "torch.cuda.synchronize()\nseen.append(time.perf_counter())\n", "")
    with pytest.raises(EditError, match="times"):
        _changed(timed, "torch.cuda.synchronize()")


def test_a_run_that_waits_for_nothing_is_refused() -> None:
    [refusal] = LEVER.propose(EvidenceBuilder().build(), ())
    assert isinstance(refusal, Refusal) and "waits" in refusal.because


def test_what_the_loop_makes_on_the_host_is_sent_without_a_wait() -> None:
    text = """
import torch
def main():
    device = "cpu"
    losses = []
    table = torch.randn(50, 3).to(device)
    for step in range(4):
        rows = torch.randint(50, (8,)).to(device)
        noise = torch.randn(8, 3)
        noise = noise.to(device=device)
        there = torch.ones(8, device=device).to(device)
        kept = table.to(device).to(torch.float64)
        loss = (table[rows] + noise).square().mean()
        losses.append(loss.item())
    return losses
"""
    changed = _changed(text, "losses.append(loss.item())")
    assert "torch.randint(50, (8,)).to(device, non_blocking=True)" in changed
    assert "noise.to(device=device, non_blocking=True)" in changed
    assert (
        changed.count("non_blocking") == 2
    )  # what lies there already, and what is outside of the loop, stays as it is
    before: dict[str, Any] = {}
    after: dict[str, Any] = {}
    exec(text, before)
    exec(changed, after)
    torch.manual_seed(0)
    expected = before["main"]()
    torch.manual_seed(0)
    assert after["main"]() == expected
