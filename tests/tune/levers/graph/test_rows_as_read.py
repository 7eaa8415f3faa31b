from __future__ import annotations

import msgspec
import pytest
import torch
from tests.evidence_builder import EvidenceBuilder
from tests.lever_tools import edited, found, pulled
from torch import Tensor, nn

from flatout.blocks.training import rows_as_read
from flatout.core.errors import EditError
from flatout.core.records.lever import Candidate, Refusal
from flatout.tune.levers.graph.rows_as_read import LEVER


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 6), nn.Linear(6, 50)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).tanh()).contiguous()


def test_each_layer_with_rows_that_nobody_reads_is_offered() -> None:
    run = EvidenceBuilder()
    run.optimizer()
    finding = msgspec.structs.replace(found(0.02), module="Tagger.head")
    [offered] = LEVER.propose(run.build(), [finding])
    assert isinstance(offered, Candidate) and offered.parameters == {"module": "Tagger.head"}
    [refused] = LEVER.propose(run.build(), [])
    assert isinstance(refused, Refusal) and "every row" in refused.because
    [refused] = LEVER.propose(EvidenceBuilder().build(), [finding])
    assert isinstance(refused, Refusal) and "no optimizer" in refused.because


def test_rows_of_the_layer_alone_are_computed_as_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    net, x, seen = Tagger(), torch.randn(2, 8, 4), []
    expected = net(x)[:, 5:]
    original = rows_as_read.late_rows
    monkeypatch.setattr(rows_as_read, "late_rows", lambda layer, s: (seen.append(s.shape), original(layer, s))[1])
    with pulled(LEVER, module="Tagger.head") as hooks:
        torch.testing.assert_close(net(x)[:, 5:], expected)
        assert hooks.done == [LEVER.id] and seen == [(2, 8, 6)]
    net(x)
    assert len(seen) == 1, "undone"


def test_the_edit_names_the_layer_behind_the_models_construction() -> None:
    text = "net = make()\noptimizer = SGD(net.parameters())\nnet(x)\n"
    changed = edited(LEVER, text, module="Tagger.blocks.2.head")
    assert "compute_rows_as_read(net.blocks[2].head)\n" in changed
    assert changed.startswith("from flatout import compute_rows_as_read\n")
    with pytest.raises(EditError, match="no path"):
        edited(LEVER, text, module="Tagger.a b")
