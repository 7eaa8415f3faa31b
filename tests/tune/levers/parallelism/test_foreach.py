from __future__ import annotations

from pathlib import Path
from textwrap import dedent, indent

import pytest
import torch
from tests.lever_tools import ran

from flatout.core.errors import EditError
from flatout.tune.levers.parallelism.foreach import LEVER

SETUP = """
    import math
    import torch

    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3), torch.nn.Linear(3, 3))
    other = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3), torch.nn.Linear(3, 3))
    net[:3](torch.randn(4, 5)).square().sum().backward()
    states = {}
    lr, decay, momentum = 0.1, 0.01, 0.9
    with torch.no_grad():
        for turn in range(3):
            scale = 1 - momentum ** (turn + 1)
"""


def text_of(loop: str) -> str:
    return dedent(SETUP) + indent(dedent(loop).strip("\n"), " " * 8) + "\n"


def edited(loop: str) -> str:
    lines = dedent(loop).strip("\n").splitlines()
    assert LEVER.edit is not None
    first = next(line.strip() for line in lines if line.lstrip().startswith("for "))
    return LEVER.edit(text_of(loop), {"file": "train.py", "function": "<module>", "code": first})


LOOPS = {
    "plain descent": """
        for p in net[:3].parameters():
            p -= lr * p.grad
    """,
    "only what has a gradient": """
        for p in net.parameters():
            if p.grad is None:
                continue
            p.data.add_(p.grad.data, alpha=-lr)
    """,
    "average of the weights": """
        for mine, theirs in zip(other.parameters(), net.parameters()):
            mine.data.mul_(momentum).add_(theirs.data, alpha=1 - momentum)
    """,
    "average by lerp, names ignored": """
        for (name, mine), theirs in zip(other.named_parameters(), net.parameters()):
            mine.lerp_(theirs, 1 - momentum)
    """,
    "an optimizer of one's own": """
        for p in net.parameters():
            if p.grad is None:
                continue
            state = states.setdefault(p, {})
            if not state:
                state["mean"], state["square"] = torch.zeros_like(p), torch.zeros_like(p)
            mean, square = state["mean"], state["square"]
            p.mul_(1 - lr * decay)
            mean.mul_(momentum).add_(p.grad, alpha=1 - momentum)
            square.mul_(0.99).addcmul_(p.grad, p.grad, value=1 - 0.99)
            width = (square / scale).sqrt_().add_(1e-8)
            p.addcdiv_(mean, width, value=-lr / scale)
    """,
    "a condition that is the same for all, a name bound twice": """
        for p in net[:3].parameters():
            step = p.grad
            if decay != 0:
                step = step.add(p, alpha=decay)
            step = torch.sqrt(step.abs()) * step.sign()
            p.sub_(step, alpha=lr)
    """,
    "numbers on the left": """
        for p in net[:3].parameters():
            room = 1.0 - p.grad * 0.5
            share = 2.0 / (room.square() + 1.0)
            p.copy_(-(p * share).clamp(min=-0.5, max=0.4) + 3 * p.clone())
    """,
}


@pytest.mark.slow
@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS.keys())
def test_the_lists_hold_what_the_loop_made(loop: str) -> None:
    text = edited(loop)
    assert "torch._foreach_" in text
    untouched, before, after = ran(text_of("pass")), ran(text_of(loop)), ran(text)
    for name in ("net", "other"):
        for one, two in zip(before[name].parameters(), after[name].parameters(), strict=True):
            torch.testing.assert_close(two, one, rtol=1e-6, atol=1e-7)
    models = [(untouched[name], before[name]) for name in ("net", "other")]
    pairs = [pair for one, two in models for pair in zip(one.parameters(), two.parameters(), strict=True)]
    assert any(not torch.equal(a, b) for a, b in pairs)


def test_nothing_is_done_where_no_tensor_is_chosen() -> None:
    loop = LOOPS["only what has a gradient"]
    text = edited(loop).replace("net[:3](torch.randn(4, 5)).square().sum().backward()", "")
    ran(text)
    assert "[p for p in net.parameters() if p.grad is not None]" in text


REFUSED = {
    "a sum over all": (
        """
        for p in net[:3].parameters():
            lr += p.grad.norm()
            p.sub_(p.grad)
        """,
        "outside the loop|handed",
    ),
    "the same step for the next": (
        """
        for p in net[:3].parameters():
            p.sub_(lr * p.grad)
            lr = lr * 0.5
        """,
        "outside the loop|handed",
    ),
    "left early": (
        """
        for p in net[:3].parameters():
            if p.grad is None:
                break
            p.sub_(p.grad)
        """,
        "left early",
    ),
    "a number of its own": (
        """
        for p in net[:3].parameters():
            p.add_(p.grad, alpha=-1 / p.numel())
        """,
        "no function|differs",
    ),
    "random": (
        """
        for p in net[:3].parameters():
            p.add_(p.grad, alpha=torch.rand(()).item())
        """,
        "another value",
    ),
    "used afterwards": (
        """
        for p in net[:3].parameters():
            step = p.grad * lr
            p.sub_(step)
        print(step)
        """,
        "outside the loop",
    ),
    "a product of matrices": (
        """
        for p in net[:3].parameters():
            q = p * 2
            p.copy_(torch.linalg.qr(q)[0])
        """,
        "no function|computed|no arithmetic",
    ),
    "a condition on each": (
        """
        for p in net[:3].parameters():
            p.mul_(0.9)
            if p.dim() > 1:
                p.sub_(p.grad)
        """,
        "differ from tensor to tensor|no arithmetic",
    ),
}


@pytest.mark.parametrize(("loop", "why"), REFUSED.values(), ids=REFUSED.keys())
def test_what_is_not_certain_is_refused(loop: str, why: str) -> None:
    with pytest.raises(EditError, match=why):
        edited(loop)


def test_the_optimizer_of_an_example_becomes_what_its_twin_has() -> None:
    slow = Path(__file__).parents[4] / "examples" / "slow" / "load_residual.py"
    assert LEVER.edit is not None
    code = 'for p in group["params"]:'
    text = LEVER.edit(slow.read_text(), {"file": slow.name, "function": "AdaBelief.step", "code": code})
    fast = slow.parents[1] / "fast" / slow.name
    calls = [line.split("(")[0].split("=")[-1].strip() for line in text.splitlines() if "_foreach_" in line]
    assert calls == [
        line.split("(")[0].split("=")[-1].strip() for line in fast.read_text().splitlines() if "_foreach_" in line
    ]
