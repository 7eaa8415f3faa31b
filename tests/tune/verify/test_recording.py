"""Recorded steps: gradients as the optimizer applies them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from flatout.tune.verify.recording import Recorder, Step, read_recorded_steps


def recorded(folder: Path, *, fused: bool, factor: float) -> list[Step]:
    """Two steps with a gradient scaler, the second with a loss that is `factor` times the first's."""
    torch.manual_seed(0)
    net = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(net.parameters(), fused=fused)
    scaler, recorder = torch.amp.GradScaler("cpu", init_scale=1024.0), Recorder(folder)
    recorder.add_module(net)
    optimizer.register_step_pre_hook(lambda optimizer, args, kwargs: recorder.add_gradients(optimizer))
    for number in (1, 2):
        loss = net(torch.ones(4, 3)).sum() * factor ** (number - 1)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        recorder.end(number)
    return read_recorded_steps(folder)


@pytest.mark.parametrize("factor", [2.0, 1e38])
def test_gradients_are_those_that_are_applied_whoever_unscales_them(tmp_path: Path, factor: float) -> None:
    """A fused optimizer gets them as the scaler made them, and skips a step with an infinite one itself."""
    steps = []
    for fused in (False, True):
        (tmp_path / str(fused)).mkdir()
        steps.append(recorded(tmp_path / str(fused), fused=fused, factor=factor))
    for plain, fused_step in zip(*steps, strict=True):
        assert plain.keys() == fused_step.keys()
        for name, digest in plain.get("gradient", {}).items():
            assert torch.equal(torch.as_tensor(digest.sketch), torch.as_tensor(fused_step["gradient"][name].sketch))
    assert ("gradient" in steps[0][1]) == (factor == 2.0)
