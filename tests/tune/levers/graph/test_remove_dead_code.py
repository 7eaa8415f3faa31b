from __future__ import annotations

import pytest
import torch
from tests.evidence_builder import EvidenceBuilder
from tests.lever_tools import edited, pulled, ran
from torch import Tensor, nn

from flatout.check.rules.compute.unused_output import RULE
from flatout.core.errors import EditError, PlanError
from flatout.core.records.lever import Candidate, Refusal
from flatout.tune.levers.graph.remove_dead_code import LEVER


class Part(nn.Module):
    def __init__(self, *, drop: float = 0.0) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.drop = nn.Dropout(drop)
        self.num = 0

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        self.num += 1
        y = self.drop(self.layer(x))
        return y, [y]


class Net(nn.Module):
    def __init__(self, *, drop: float = 0.0) -> None:
        super().__init__()
        self.head, self.part = nn.Linear(2, 2), Part(drop=drop)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        (painted, _), logits = self.part(x), self.head(x)
        return logits, painted


def trained(*, drop: float = 0.0) -> tuple[Tensor, int]:
    torch.manual_seed(0)
    net, x = Net(drop=drop), torch.randn(4, 2)
    optimizer = torch.optim.AdamW(net.parameters())
    for _ in range(4):
        logits, _ = net(x)
        optimizer.zero_grad()
        logits.square().mean().backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in net.parameters()]), net.part.num


def test_a_part_whose_output_nobody_reads_is_run_once() -> None:
    expected, _ = trained()
    with pulled(LEVER, module="Net.part") as hooks:
        weights, num = trained()
        assert hooks.done == [LEVER.id]
    assert torch.equal(weights, expected) and num == 1
    assert trained()[1] == 4


def test_a_part_that_draws_random_numbers_goes_on_running() -> None:
    expected, _ = trained(drop=0.5)
    with pulled(LEVER, module="Net.part") as hooks:
        weights, num = trained(drop=0.5)
        assert not hooks.done
    assert torch.equal(weights, expected) and num == 4


@pytest.mark.parametrize(
    "use",
    [
        lambda y: y.sum(),
        torch.sin,
        lambda y: torch.ones(2) + y,
        lambda y: y * 2,
        lambda y: y[0],
        float,
        bool,
        print,
        list,
        lambda y: torch.stack([y]),
        lambda y: y == 0,
        lambda y: hasattr(y, "shape"),
    ],
)
def test_whatever_is_done_with_a_placeholder_raises(use: object) -> None:
    with pulled(LEVER, module="Net.part"):
        net, x = Net(), torch.randn(4, 2)
        net(x)
        with pytest.raises(PlanError, match=r"'Net\.part' is read"):
            use(net(x)[1])  # type: ignore[operator]


def test_evaluation_gets_the_real_output() -> None:
    with pulled(LEVER, module="Net.part"):
        net, x = Net(), torch.randn(4, 2)
        net(x), net(x)
        with torch.no_grad():
            assert torch.equal(net(x)[1], net.part.layer(x))


def dead_run(*, is_read: bool) -> EvidenceBuilder:
    run = EvidenceBuilder()
    line, other = run.line("m.py", 3, "y = self.layer(x)"), run.line("m.py", 9, "loss.backward()")
    spare = run.operator("aten.mm", line, inputs=[(8, 8)], output=(8, 8), op_s=0.02, module="Net.part.layer")
    used = run.operator("aten.mm", line, inputs=[(8, 8)], output=(8, 8), op_s=0.02, module="Net.head")
    back = run.operator("aten.mm", other, inputs=[(8, 8)], output=(8, 8), op_s=0.02, module="Net", phase="backward")
    first, second = run.call(spare), run.call(used)
    run.call(back, second, *([first] if is_read else []))
    run.escapes = ()
    return run


def test_a_part_in_which_all_is_dead_is_offered() -> None:
    evidence = dead_run(is_read=False).build()
    [candidate] = LEVER.propose(evidence, list(RULE.check(evidence)))
    assert isinstance(candidate, Candidate) and candidate.parameters == {"module": "Net.part"}


def test_a_run_in_which_all_is_read_is_refused() -> None:
    evidence = dead_run(is_read=True).build()
    [refusal] = LEVER.propose(evidence, list(RULE.check(evidence)))
    assert isinstance(refusal, Refusal)


LOOP = """
    import torch

    told = []
    torch.manual_seed(0)
    for step in range(1, 7):
        logits = torch.randn(4, 3)
        labels = torch.randint(3, (4,))
        guess = logits.argmax(dim=1)
        accuracy = (guess == labels).float().mean()
        loss = logits.square().mean()
        if step % 3 == 0:
            told.append((loss.item(), accuracy.item()))
"""


def test_a_figure_is_made_where_it_is_read() -> None:
    text = edited(LEVER, LOOP, file="train.py", function="<module>", code="guess = logits.argmax(dim=1)")
    assert "    if step % 3 == 0:\n        guess = logits.argmax(dim=1)\n        accuracy = (guess" in text
    assert ran(text)["told"] == ran(LOOP)["told"]


def test_a_figure_that_nobody_reads_goes() -> None:
    unread = LOOP.replace(", accuracy.item()", "")
    text = edited(LEVER, unread, file="train.py", function="<module>", code="guess = logits.argmax(dim=1)")
    assert "guess" not in text and "accuracy" not in text
    assert ran(text)["told"] == ran(unread)["told"]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("loss = logits.square().mean()", "logits = logits * 2\n        loss = logits.square().mean()"),
        ("loss = logits.square().mean()", "loss = logits.square_().mean()"),
        ("if step % 3 == 0:", "if step % 3 == 0 and guess[0] == 1:"),
        ("guess = logits.argmax(dim=1)", "guess = torch.multinomial(logits.softmax(1), 1)"),
        ("loss = logits.square().mean()", "loss = logits.square().mean()\n        told.append(guess.sum())"),
    ],
)
def test_a_figure_that_would_come_out_otherwise_stays(old: str, new: str) -> None:
    code = new if new.startswith("guess") else "guess = logits.argmax(dim=1)"
    with pytest.raises(EditError):
        edited(LEVER, LOOP.replace(old, new), file="train.py", function="<module>", code=code)
