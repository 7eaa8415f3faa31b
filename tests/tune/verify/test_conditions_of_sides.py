"""Both sides of a proof are measured under the same conditions, whichever of them was recorded before."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

import msgspec
import pytest
import torch

from flatout.tune.verify.proof import ScriptProver
from flatout.tune.verify.proof_terms import ProofTerms
from flatout.tune.verify.side import SideAnswer
from flatout.tune.verify.side_process import Request, SideProcess

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("forked"),
    pytest.mark.skipif(sys.platform != "linux", reason="the peak of resident memory can be reset on Linux alone"),
]

WIDE = """
    import torch
    from torch import nn

    torch.manual_seed(0)
    net = nn.Linear(2000, 5000, bias=False).to("{device}")
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    x = torch.randn(2, 2000, device="{device}")
    for step in range(400):
        net(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
"""
NUM_BYTES = 4 * 2000 * 5000
"""Bytes of the weight, as of its gradient."""


def wide_script(folder: Path, device: str) -> Request:
    path = folder / "wide.py"
    path.write_text(textwrap.dedent(WIDE).format(device=device))
    return Request(target=str(path), num_recorded=2, seed=0)


@pytest.fixture
def wide(tmp_path: Path) -> Request:
    return wide_script(tmp_path, "cpu")


def last_answer(request: Request) -> SideAnswer:
    """The answer after a stretch of steps that follow the first ones."""
    with SideProcess(request) as process:
        process.answer(timeout_s=60.0)
        process.order(4)
        return process.answer(timeout_s=60.0)


@pytest.mark.long
def test_what_recording_takes_does_not_count_as_the_scripts_peak(wide: Request, tmp_path: Path) -> None:
    recorded, plain = last_answer(msgspec.structs.replace(wide, folder=str(tmp_path))), last_answer(wide)
    assert abs(recorded.peak_bytes - plain.peak_bytes) < NUM_BYTES // 4


@pytest.mark.long
def test_a_script_has_its_own_peak_in_a_later_comparison_too(wide: Request) -> None:
    terms = ProofTerms(num_steps=2, budget_s=0.5, num_processes=1, timeout_s=60.0)
    with ScriptProver(wide, terms) as prover:
        prover.prove(wide, wide)
        later = prover.prove(wide, wide)
    assert later.footprints[0].fraction == pytest.approx((1, 1), abs=0.05)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_what_recording_takes_of_a_device_does_not_count(tmp_path: Path) -> None:
    request = wide_script(tmp_path, "cuda")
    plain, recorded = last_answer(request), last_answer(msgspec.structs.replace(request, folder=str(tmp_path)))
    assert recorded.device_peak_bytes == plain.device_peak_bytes >= 2 * NUM_BYTES


DIVERGING = """
    import torch
    from torch import nn

    net = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(30):
        loss = net(torch.ones(2, 4)).sum() * (float("inf") if step == 8 else 1.0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""


def test_a_side_says_when_its_weights_are_no_longer_finite(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(textwrap.dedent(DIVERGING))
    with SideProcess(Request(target=str(path), num_recorded=2, seed=0)) as process:
        answers = [process.answer(timeout_s=60.0)]
        for size in (4, 6):
            process.order(size)
            answers.append(process.answer(timeout_s=60.0))
    assert [(a.what, a.is_finite) for a in answers] == [("recorded", True), ("ran", True), ("ran", False)]
