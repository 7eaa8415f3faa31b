"""graph.fused-recurrence: a cell called step by step becomes one call over the sequence."""

from __future__ import annotations

from pathlib import Path
from textwrap import indent
from typing import Any

import msgspec
import pytest
import torch
from tests.evidence_builder import EvidenceBuilder
from tests.lever_tools import found

from flatout.core.errors import EditError
from flatout.core.records.lever import Candidate, Refusal
from flatout.core.records.workload import Source
from flatout.tune.levers.graph.fused_recurrence import LEVER, edit

HEAD = """import torch
import torch.nn.functional as F
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(3, 3)
        self.lstm = nn.LSTMCell(3, 5)
        self.gru = nn.GRUCell(3, 5)
        self.upper = nn.GRUCell(5, 5, bias=False)
        self.rnn = nn.RNNCell(3, 5, nonlinearity="relu")
        self.head = nn.Linear(5, 2)

    def forward(self, x):
"""

CASES = {
    "LSTM, stacked": (
        "h, c = self.lstm(x[:, t], (h, c))",
        """
h = c = x.new_zeros(x.shape[0], 5)
outputs = []
for t in range(x.shape[1]):
    h, c = self.lstm(x[:, t], (h, c))
    outputs.append(h)
return self.head(torch.stack(outputs, dim=1))
""",
    ),
    "LSTM, the last states": (
        "h, c = self.lstm(x[:, t, :], (h, c))",
        """
batch, length, _ = x.shape
h = x.new_zeros(batch, 5)
c = x.new_ones(batch, 5)
for t in range(length):
    h, c = self.lstm(x[:, t, :], (h, c))
return h + c
""",
    ),
    "LSTM, its state in one name that starts as None": (
        "state = self.lstm(x_t, state)",
        """
state = None
outputs = []
for x_t in x.unbind(1):
    state = self.lstm(x_t, state)
    outputs.append(state[0])
return torch.stack(outputs)
""",
    ),
    "GRU from None, time first": (
        "h = self.gru(steps[t], h)",
        """
h = None
steps = x.transpose(0, 1)
outputs = []
for t in range(len(steps)):
    h = self.gru(steps[t], h)
    outputs.append(h)
return torch.stack(outputs, 1), h
""",
    ),
    "GRU, each input embedded, each state read out": (
        "h = self.gru(e, h)",
        """
h = torch.zeros(x.size(0), 5, dtype=x.dtype)
logits = []
for t in range(x.size(1)):
    e = torch.relu(self.embed(x[:, t]))
    h = self.gru(e, h)
    logits.append(self.head(h))
return torch.stack(logits, dim=1)
""",
    ),
    "part of the sequence": (
        "h = self.rnn(x[:, t], h)",
        """
h = x.new_zeros(x.shape[0], 5)
out = []
for t in range(1, 4):
    h = self.rnn(x[:, t], h)
    out.append(h.unsqueeze(1))
return torch.cat(out, dim=1)
""",
    ),
    "a tensor made for all": (
        "h = self.gru(x[:, t] * 0.5, h)",
        """
h = x.new_zeros(x.shape[0], 5)
out = x.new_empty(x.shape[0], x.shape[1], 5)
for t in range(x.shape[1]):
    h = self.gru(x[:, t] * 0.5, h)
    out[:, t] = h
return out
""",
    ),
    "two layers": (
        "h = self.gru(x_t, h)",
        """
h = g = x.new_zeros(x.shape[0], 5)
out = []
for t, x_t in enumerate(torch.unbind(x, 1)):
    h = self.gru(x_t, h)
    g = self.upper(h, g)
    out.append(g)
return torch.stack(out, dim=1)
""",
    ),
}


def text_of(body: str) -> str:
    return HEAD + indent(body.strip("\n"), "        ") + "\n"


def edited(body: str, code: str) -> str:
    return edit(text_of(body), {"file": "a.py", "function": "Net.forward", "code": code})


def net_of(text: str) -> Any:
    names: dict[str, Any] = {}
    exec(text, names)
    torch.manual_seed(0)
    return names["Net"]().double()


@pytest.mark.slow
@pytest.mark.parametrize(("code", "body"), CASES.values(), ids=list(CASES))
def test_states_and_gradients_are_those_of_the_loop(code: str, body: str) -> None:
    before = net_of(text_of(body))
    new = edited(body, code)
    after = net_of(new)
    x = torch.randn(4, 6, 3, dtype=torch.float64)

    assert "for " not in new.partition("def forward")[2]
    assert list(before.state_dict()) == list(after.state_dict())
    one, two = before(x), after(x)
    torch.testing.assert_close(one, two, rtol=1e-10, atol=1e-12)
    for out in (one, two):
        total = sum(o.square().sum() for o in (out if isinstance(out, tuple) else (out,)))
        total.backward()
    for p, q in zip(before.parameters(), after.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None)
        if p.grad is not None:
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-10, atol=1e-12)


def test_it_reads_as_a_person_would_write_it() -> None:
    code, body = CASES["LSTM, stacked"]
    assert edited(body, code) == text_of(
        """
h = c = x.new_zeros(x.shape[0], 5)
outputs, _, _ = torch.lstm(x, (h[None], c[None]), list(self.lstm.parameters()), True, 1, 0.0, True, False, True)
return self.head(outputs)
"""
    )


REFUSED = {
    "an input that depends on the state": (
        "h = self.gru(self.embed(h[:, :3]), h)",
        "h = x\nfor t in range(4):\n    h = self.gru(self.embed(h[:, :3]), h)\nreturn h",
        "whole sequence",
    ),
    "left early": (
        "h = self.gru(x[:, t], h)",
        "h = x\nfor t in range(4):\n    h = self.gru(x[:, t], h)\n    if t > 2:\n        break\nreturn h",
        "left early",
    ),
    "the state changed between": (
        "h = self.gru(x[:, t], h)",
        "h = x\nfor t in range(4):\n    h = self.gru(x[:, t], h)\n    h = F.dropout(h)\nreturn h",
        "'h' of the last position",
    ),
    "something else is done": (
        "h = self.gru(x[:, t], h)",
        "h = x\nfor t in range(4):\n    h = self.gru(x[:, t], h)\n    print(t)\nreturn h",
        "each position alone",
    ),
    "a cell that is not made here": (
        "h = self.other(x[:, t], h)",
        "h = x\nfor t in range(4):\n    h = self.other(x[:, t], h)\nreturn h",
        "no recurrent cell",
    ),
    "a list that is used otherwise": (
        "h = self.gru(x[:, t], h)",
        "h = x\nout = []\nfor t in range(4):\n    h = self.gru(x[:, t], h)\n    out.append(h)\nreturn out",
        "other than in a stack",
    ),
    "the counter as a number": (
        "h = self.gru(x[:, t], h)",
        "h = x\nout = []\nfor t in range(4):\n    h = self.gru(x[:, t], h)\n    out.append(h * t)\nreturn torch.stack(out)",
        "whole sequence",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(("code", "body", "why"), REFUSED.values(), ids=list(REFUSED))
def test_it_refuses_what_is_not_certain(code: str, body: str, why: str) -> None:
    with pytest.raises(EditError, match=why):
        edited(body, code)


def test_it_offers_itself_where_a_cell_was_seen(tmp_path: Path) -> None:
    code, body = CASES["LSTM, stacked"]
    script = tmp_path / "train.py"
    script.write_text(text_of(body), encoding="utf-8")
    number = next(i for i, line in enumerate(text_of(body).splitlines(), start=1) if line.strip() == code)
    here = Source(file=str(script), line=number, function="Net.forward")
    run = EvidenceBuilder()
    run.recurrence(run.line("train.py", number, code), kind="LSTMCell", calls=100)
    evidence = run.build()
    workload = msgspec.structs.replace(evidence.workload, command=("python", "train.py"), cwd=str(tmp_path))
    evidence = msgspec.structs.replace(evidence, workload=workload, sources=(here,))
    finding = msgspec.structs.replace(found(0.01), where=here)

    [said] = LEVER.propose(evidence, [finding])
    assert isinstance(said, Candidate) and said.parameters["code"] == code
    elsewhere = msgspec.structs.replace(finding, where=msgspec.structs.replace(here, line=3))
    [refused] = LEVER.propose(evidence, [elsewhere])
    assert isinstance(refused, Refusal) and LEVER.edit is edit
