"""memory.sparse-gradient: tables whose optimizer leaves untouched rows alone get sparse gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import torch
from tests.evidence_builder import EvidenceBuilder
from tests.lever_tools import found, pulled
from torch import nn

from flatout.core.errors import EditError
from flatout.core.records.lever import Candidate, Refusal
from flatout.tune.levers.memory.sparse_gradient import LEVER, edit

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # torch says it once of every sparse tensor
ROWS = 500
Make = Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer]
ABLE: dict[str, Make] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.5),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.5, fused=True),
    "Adagrad that decays its rate": lambda p: torch.optim.Adagrad(p, lr=0.5, lr_decay=0.1),
}
UNABLE: dict[str, Make] = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.9),
    "decay": lambda p: torch.optim.Adagrad(p, lr=0.5, weight_decay=0.1),
    "decay of a group": lambda p: torch.optim.SGD([{"params": list(p), "weight_decay": 0.1}], lr=0.5),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.5),
}


def trained(make: Make, **options: Any) -> tuple[bool, list[torch.Tensor]]:
    """Whether the table's gradients were sparse, and the parameters after three steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.EmbeddingBag(ROWS, 8, **options), nn.Linear(8, 1))
    optimizer = make(model.parameters())
    is_sparse = False
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randint(20, (16, 5))).square().sum().backward()
        gradient = model[0].weight.grad
        assert isinstance(gradient, torch.Tensor)
        is_sparse = gradient.is_sparse
        optimizer.step()
    return is_sparse, list(model.parameters())


@pytest.mark.parametrize("name", ABLE)
def test_the_update_is_the_same_with_rows_alone(name: str) -> None:
    _, before = trained(ABLE[name])
    with pulled(LEVER, table="0", rows=ROWS) as hooks:
        is_sparse, after = trained(ABLE[name])
        assert hooks.done == [LEVER.id]
    assert is_sparse
    for one, two in zip(before, after, strict=True):
        torch.testing.assert_close(one, two)


@pytest.mark.parametrize("name", UNABLE)
def test_an_optimizer_that_moves_untouched_rows_is_left_alone(name: str) -> None:
    with pulled(LEVER, table="0", rows=ROWS) as hooks:
        is_sparse, _ = trained(UNABLE[name])
        assert not is_sparse
        assert not hooks.done


@pytest.mark.parametrize("options", [{"max_norm": 1.0}, {"mode": "max"}, {"scale_grad_by_freq": True}])
def test_a_table_without_sparse_gradients_is_left_alone(options: dict[str, Any]) -> None:
    with pulled(LEVER, table="0", rows=ROWS):
        assert not trained(ABLE["SGD"], **options)[0]


def test_small_tables_stay_dense_and_all_is_undone() -> None:
    with pulled(LEVER, table="0", rows=ROWS + 1):
        assert not trained(ABLE["SGD"])[0]
    assert not trained(ABLE["SGD"])[0]


SCRIPT = """
import torch
from torch import nn
table = nn.Embedding(100, 4)
optimizer = torch.optim.{optimizer}
"""


def test_the_edit_makes_table_and_optimizer_agree() -> None:
    new = edit(
        SCRIPT.format(optimizer="Adagrad(table.parameters(), lr=0.1, fused=True)"), {"table": "table", "rows": 9}
    )
    assert "nn.Embedding(100, 4, sparse=True)\n" in new
    assert "Adagrad(table.parameters(), lr=0.1)\n" in new


def test_the_edit_has_sgd_add_up_the_parts_of_a_row_first() -> None:
    new = edit(SCRIPT.format(optimizer="SGD(table.parameters(), lr=0.1)"), {"table": "table", "rows": 9})
    made: dict[str, Any] = {}
    exec(new, made)
    made["table"](torch.tensor([3, 3, 5])).sum().backward()
    assert made["table"].weight.grad._nnz() == 2


@pytest.mark.parametrize(
    ("optimizer", "why"),
    [
        ("Adam(table.parameters())", "moves rows"),
        ("SGD(table.parameters(), lr=0.1, momentum=0.9)", "moves rows"),
        ("SGD(table.parameters(), 0.1)\nother = torch.optim.Adam(x)", "2 optimizers"),
        ("SGD(table.parameters(), 0.1)\nhead.weight = table.weight", "another name"),
    ],
)
def test_the_edit_is_refused(optimizer: str, why: str) -> None:
    with pytest.raises(EditError, match=why):
        edit(SCRIPT.format(optimizer=optimizer), {"table": "table", "rows": 9})


@pytest.mark.parametrize(("name", "kind"), [("SGD", Candidate), ("Adam", Refusal)])
def test_it_is_offered_for_optimizers_that_leave_rows_alone(name: str, kind: type) -> None:
    run = EvidenceBuilder()
    line = run.line("a.py", 3)
    row = run.operator("aten.embedding_dense_backward", line, inputs=[(9, 4), (9,)], output=(ROWS, 4))
    run.optimizer(line, constructed=line, name=name)
    run.fact("parameter-shapes", text=f"{ROWS}x4,4", source=line)
    finding = msgspec.structs.replace(found(0.01), operators=(row,), module="Net.table")
    [said] = LEVER.propose(run.build(), [finding])
    assert isinstance(said, kind)
    if isinstance(said, Candidate):
        assert said.parameters == {"table": "table", "rows": ROWS}


def test_a_run_without_such_a_table_is_refused() -> None:
    [said] = LEVER.propose(EvidenceBuilder().build(), [])
    assert isinstance(said, Refusal)
