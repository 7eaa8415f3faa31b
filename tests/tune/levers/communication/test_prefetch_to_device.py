from __future__ import annotations

import textwrap
from typing import Any

import pytest
import torch
from tests.evidence_builder import EvidenceBuilder
from tests.lever_tools import found, pulled
from torch.utils.data import DataLoader, TensorDataset

from flatout.core.errors import EditError
from flatout.core.records.lever import Candidate, Refusal
from flatout.tune.levers.communication.prefetch_to_device import LEVER, edit


def on_device(**loader: Any) -> EvidenceBuilder:
    run = EvidenceBuilder(device_s=0.08)
    if loader:
        run.loader(**loader)
    return run


def test_copies_of_what_a_loader_makes_are_to_be_made_ahead() -> None:
    run = on_device(source=0, fetches=1.0)
    [candidate] = LEVER.propose(run.build(), [found(0.02)])
    assert isinstance(candidate, Candidate)
    assert candidate.saved_s[0] <= 0.01 <= candidate.saved_s[1]


@pytest.mark.parametrize(
    ("run", "why"),
    [(EvidenceBuilder(), "CPU"), (on_device(), "DataLoader"), (on_device(source=0, fetches=0.1), "Data")],
)
def test_where_it_cannot_help_it_says_why(run: EvidenceBuilder, why: str) -> None:
    [refusal] = LEVER.propose(run.build(), [found(0.02)])
    assert isinstance(refusal, Refusal)
    assert why in refusal.because


def test_batches_come_out_on_the_device_and_afterwards_as_before() -> None:
    loader = DataLoader(TensorDataset(torch.arange(5.0)), 2)
    before = DataLoader.__iter__
    with pulled(LEVER, device="meta") as hooks:
        assert [x.is_meta for (x,) in loader] == [True] * 3
        assert all(x.to("meta") is x for (x,) in loader)
        assert hooks.done == [LEVER.id]
    assert DataLoader.__iter__ is before
    assert not any(x.is_meta for (x,) in loader)


def test_without_an_accelerator_nothing_is_done() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pulled(LEVER) as hooks:
        assert len(list(DataLoader(TensorDataset(torch.arange(5)), 2))) == 3
        assert not hooks.done


SCRIPT = """
import torch
from torch.utils.data import DataLoader, TensorDataset
device = torch.device("cpu")
loader = DataLoader(TensorDataset(torch.arange(6.0), torch.arange(6.0)), 2)
seen = []
for {target} in {loader}:
{body}
"""


def script(target: str, loader: str, body: str) -> str:
    return SCRIPT.format(target=target, loader=loader, body=textwrap.indent(textwrap.dedent(body).strip(), "    "))


@pytest.mark.parametrize(
    ("target", "loader", "body", "expected", "gone"),
    [
        (
            "x, y",
            "loader",
            "x = x.to(device)\ny = y.to(device)\nseen.append(x + y)",
            "x, y in Prefetch(loader, device)",
            ".to(",
        ),
        (
            "x, y",
            "loader",
            "x, y = x.to(device), y.to(device)\nseen.append(x + y)",
            "in Prefetch(loader, device):",
            ".to(",
        ),
        (
            "i, (x, y)",
            "enumerate(loader)",
            "seen.append(x.to(device) + y.to(device) + i)",
            "enumerate(Prefetch(loader, device))",
            ".to(",
        ),
        (
            "x, y",
            "loader",
            "x = x.to(device, non_blocking=True)\nseen.append(x + y.to(device))",
            "Prefetch(loader, device)",
            "non_blocking",
        ),
        (
            "x, y",
            "loader",
            "x, y = x.to(device), y.to(device)\nif True:\n    x = x + 1\ny *= 2\nseen.append(x + y)",
            "x, y in Prefetch(loader, device)",
            ".to(",
        ),
        (
            "x, y",
            "loader",
            "x = x.to(device) + 1\nx += 1\nseen.append(x + y)",
            "    x = x + 1\n    x += 1",
            ".to(",
        ),
    ],
)
def test_the_loop_reads_ahead_and_copies_no_more(target: str, loader: str, body: str, expected: str, gone: str) -> None:
    text = script(target, loader, body)
    changed = edit(text, {})
    assert expected in changed
    assert gone not in changed
    assert "from flatout import Prefetch" in changed
    before: dict[str, Any] = {}
    after: dict[str, Any] = {}
    exec(text, before)
    exec(changed, after)
    assert len(after["seen"]) == 3
    assert all(map(torch.equal, after["seen"], before["seen"]))


@pytest.mark.parametrize(
    ("target", "loader", "body", "why"),
    [
        ("x, y", "loader", "seen.append(x)", "no loops"),
        ("x, y", "loader", "seen.append(x.to(torch.float64))", "no loops"),
        ("x, y", "zip(loader, loader)", "x = x.to(device)\nseen.append(x)", "not a loader"),
        ("x, y", "loader", "x = x * 2\nx = x.to(device)\nseen.append(x)", "'x' is assigned"),
        ("x, y", "loader", "if True:\n    x = x * 2\n    x = x.to(device)\nseen.append(x)", "'x' is assigned"),
        ("x, y", "loader", "x = x.to(device) * 2\nx = x.to(device)\nseen.append(x)", "'x' is assigned"),
        ("x, y", "loader", "device = 'cpu'\nx = x.to(device)\nseen.append(x)", "'device' is set"),
        ("x, y", "loader", "seen.append(x.to('cpu') + y.to(device))", "several devices"),
    ],
)
def test_what_is_not_certain_is_left(target: str, loader: str, body: str, why: str) -> None:
    with pytest.raises(EditError, match=why):
        edit(script(target, loader, body), {})
