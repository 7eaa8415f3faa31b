"""`flatout.check(step, batches)`: a step function observed in this process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.page_reader import Page, check_harmless
from torch import Tensor, nn

import flatout
from flatout.app.session import Checked
from flatout.core.errors import CaptureError
from flatout.report.json_report import read_evidence

pytestmark = pytest.mark.slow


def make_step() -> Callable[[Tensor], None]:
    net = nn.Linear(16, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def step(x: Tensor) -> None:
        optimizer.zero_grad()
        net(x).square().mean().backward()
        optimizer.step()

    return step


@pytest.fixture(scope="module")
def checked() -> Checked:
    """Thirty calls, observed once for all tests that look at a result."""
    return flatout.check(make_step(), (torch.randn(8, 16) for _ in range(30)), observe_s=1.0)


@pytest.mark.long
def test_each_call_is_a_step_and_the_result_prints_as_the_report(checked: Checked) -> None:
    assert checked.evidence.steps.kind == "call"
    assert checked.evidence.steps.num_observed == 30
    assert checked.evidence.operators
    assert checked.diagnosis.step_s > 0
    assert "other causes" in str(checked)


def test_no_batches_is_one_clear_error() -> None:
    with pytest.raises(CaptureError, match="gave no batch"):
        flatout.check(make_step(), [])


def test_what_the_step_raises_is_the_callers() -> None:
    def failing(x: Tensor) -> None:
        raise ZeroDivisionError("the caller's own")

    with pytest.raises(ZeroDivisionError, match="the caller's own"):
        flatout.check(failing, [torch.randn(2)])
    assert torch.nn.Module.__call__.__qualname__ == "Module._wrapped_call_impl"


def test_the_result_draws_and_saves_the_report_of_the_command(checked: Checked, tmp_path: Path) -> None:
    assert repr(checked) == str(checked)
    page = Page(checked._repr_html_().encode())
    check_harmless(page)
    assert "a call" in page.text
    for suffix in ("json", "html", "md", "txt"):
        checked.save(tmp_path / f"report.{suffix}")
    assert read_evidence((tmp_path / "report.json").read_bytes()) == checked.evidence
    check_harmless(Page((tmp_path / "report.html").read_bytes()))
    assert checked.markdown().startswith("### flatout: ")
