from __future__ import annotations

import pytest
import torch
from tests.evidence_builder import EvidenceBuilder
from tests.lever_tools import pulled, ran
from torch import nn

from flatout.core.errors import EditError
from flatout.core.records.lever import Candidate, Refusal
from flatout.tune.levers.workload.cudnn_benchmark import LEVER, edit


def run(*, device_s: float | None = 0.099, seconds: float = 0.05, calls: float = 1.0) -> EvidenceBuilder:
    """A step of 100 ms with a convolution."""
    built = EvidenceBuilder(device_s=device_s)
    line = built.line("train.py", 5, "out = net(x)")
    built.model(line)
    built.operator("aten.convolution", line, inputs=[(8, 3, 32, 32), (16, 3, 3, 3)], op_s=seconds / calls, calls=calls)
    built.setting("cudnn_benchmark", "False")
    return built


def refusal(built: EvidenceBuilder) -> str:
    [found] = LEVER.propose(built.build(), ())
    assert isinstance(found, Refusal)
    return found.because


def test_convolutions_of_one_shape_on_a_gpu_are_proposed() -> None:
    [candidate] = LEVER.propose(run().build(), ())
    assert isinstance(candidate, Candidate)
    assert candidate.saved_s[0] == 0 and 0.01 < candidate.saved_s[1] < 0.05


def test_what_gains_nothing_is_refused() -> None:
    assert "GPUs" in refusal(run(device_s=None))
    assert "convolutions take" in refusal(run(seconds=0.001))
    assert "shapes change" in refusal(run(calls=0.5))
    for name, why in (("cudnn_benchmark", "already"), ("deterministic_algorithms", "deterministic")):
        built = EvidenceBuilder(device_s=0.09)
        built.setting(name, "True")
        assert why in refusal(built)


def test_it_is_on_also_after_the_script_has_set_it_and_not_afterwards() -> None:
    net, before = nn.Linear(3, 2), torch.backends.cudnn.benchmark
    with pulled(LEVER) as hooks:
        assert torch.backends.cudnn.benchmark
        torch.backends.cudnn.benchmark = False
        net(torch.ones(1, 3))
        assert torch.backends.cudnn.benchmark
        assert hooks.done == [LEVER.id]
    assert torch.backends.cudnn.benchmark == before


def test_one_line_is_written_after_the_imports() -> None:
    text = "import torch\n\nx = torch.ones(3)\n"
    new = edit(text, {})
    assert new == "import torch\n\ntorch.backends.cudnn.benchmark = True\n\nx = torch.ones(3)\n"
    before = torch.backends.cudnn.benchmark
    try:
        assert len(ran(new)["x"]) == 3 and torch.backends.cudnn.benchmark
    finally:
        torch.backends.cudnn.benchmark = before
    with pytest.raises(EditError, match="itself"):
        edit(new, {})
