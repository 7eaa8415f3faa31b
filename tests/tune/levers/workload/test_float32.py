"""workload.float32: models compute in float32, their surroundings go on as they were."""

from __future__ import annotations

import msgspec
import pytest
import torch
from tests.evidence_builder import EvidenceBuilder
from tests.lever_tools import found, pulled
from torch import nn

from flatout.core.errors import EditError
from flatout.core.records.lever import Candidate, Refusal
from flatout.tune.levers.workload.float32 import LEVER, edit


class Scaled(nn.Module):
    """A linear layer whose buffer is float64 by accident."""

    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(3, 2)
        self.register_buffer("scale", torch.linspace(0, 1, 3, dtype=torch.float64))
        self.seen: list[torch.dtype] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scaled = x * self.scale
        self.seen.append(scaled.dtype)
        return self.linear(scaled.to(self.linear.weight.dtype))  # type: ignore[no-any-return]


def test_a_float64_buffer_no_longer_makes_the_model_float64_and_is_put_back() -> None:
    model, x = Scaled(), torch.randn(4, 3)
    exact = model(x)
    with pulled(LEVER) as hooks:
        torch.testing.assert_close(model(x), exact)
        assert hooks.done == [LEVER.id]
    model(x)
    assert model.seen == [torch.float64, torch.float32, torch.float64]


def test_a_double_model_is_trained_in_float32_and_gives_float64() -> None:
    model = nn.Linear(3, 1).double()
    weight = model.weight
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    with pulled(LEVER):
        loss = nn.functional.mse_loss(model(torch.randn(4, 3).double()), torch.zeros(4, 1).double())
        assert loss.dtype == torch.float64
        loss.backward()
        optimizer.step()
        assert model.weight is weight
        assert weight.dtype == torch.float32
    assert weight.dtype == torch.float64
    assert model(torch.randn(4, 3).double()).dtype == torch.float64


def test_autocast_is_off_inside() -> None:
    model, x = nn.Linear(3, 1), torch.randn(4, 3)
    with pulled(LEVER) as hooks, torch.autocast("cpu", dtype=torch.bfloat16):
        assert model(x).dtype == torch.float32
        assert hooks.done == [LEVER.id]


def test_a_model_in_float32_is_left_alone() -> None:
    with pulled(LEVER) as hooks:
        nn.Linear(3, 1)(torch.randn(4, 3))
        assert not hooks.done


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("model = Net().double()", "model = Net()\n"),
        ("model = Net().to(torch.float64)", "model = Net()\n"),
        ("x = torch.from_numpy(a / 2).unsqueeze(1)", "x = torch.from_numpy(a / 2).float().unsqueeze(1)\n"),
        ("x = torch.linspace(0, 1, 5, dtype=torch.float64)", "x = torch.linspace(0, 1, 5, dtype=torch.float32)\n"),
        ("torch.set_default_dtype(torch.float64)", "import torch\ny = 1\n"),
    ],
)
def test_the_edit_leaves_the_widening_out(line: str, expected: str) -> None:
    new = edit(f"import torch\n{line}\ny = 1\n", {"file": "a.py", "places": (f"<module>: {line}",)})
    assert expected in new
    assert "64" not in new and "double" not in new


def test_the_edit_is_refused_where_nothing_plainly_widens() -> None:
    with pytest.raises(EditError, match="plainly"):
        edit("import torch\nx = load()\n", {"file": "a.py", "places": ("<module>: x = load()",)})
    with pytest.raises(EditError, match="not found"):
        edit("import torch\n", {})


def test_it_is_offered_where_a_rule_found_it() -> None:
    run = EvidenceBuilder()
    [said] = LEVER.propose(run.build(), [msgspec.structs.replace(found(0.01), rule="compute.accidental-float64")])
    assert isinstance(said, Candidate)
    [refusal] = LEVER.propose(run.build(), [])
    assert isinstance(refusal, Refusal)
    assert LEVER.dtype is not None and LEVER.dtype({}) == "float32"
