from __future__ import annotations

import msgspec
import pytest
import torch
from tests.evidence_builder import MACHINE, EvidenceBuilder
from tests.lever_tools import pulled
from torch import nn

from flatout.core.errors import EditError, PlanError
from flatout.core.records.lever import Candidate, Refusal
from flatout.tune.levers.workload.tf32 import LEVER, edit


def _run(*, device_s: float | None = 0.09, rate: float = 6.0) -> EvidenceBuilder:
    rates = {"float32": 50e12, "tf32": rate * 50e12}
    run = EvidenceBuilder(device_s=device_s, machine=msgspec.structs.replace(MACHINE, matmul_flop_per_s=rates))
    line = run.line("train.py", 5, "out = net(x)")
    run.model(line)
    run.operator("aten.addmm", line, inputs=[(64,), (64, 64), (64, 64)], op_s=0.06)
    return run


def _refusal(run: EvidenceBuilder) -> str:
    [said] = LEVER.propose(run.build(), ())
    assert isinstance(said, Refusal)
    return said.because


def test_float32_products_on_a_gpu_with_units_for_tf32_are_offered() -> None:
    [candidate] = LEVER.propose(_run().build(), ())
    assert isinstance(candidate, Candidate)
    assert candidate.parameters == {"level": "high"}
    assert 0 < candidate.saved_s[0] < 0.05 < candidate.saved_s[1]
    assert LEVER.dtype is not None and LEVER.dtype(candidate.parameters) == "tf32"


def test_processors_old_gpus_and_scripts_that_allow_it_are_refused() -> None:
    assert "GPUs" in _refusal(_run(device_s=None))
    assert "no units" in _refusal(_run(rate=1.0))
    run = _run()
    run.setting("float32_matmul_precision", "high")
    assert "already" in _refusal(run)


def test_convolutions_that_run_in_it_already_are_no_reason() -> None:
    """cuDNN takes TF32 unless it is told not to."""
    run = EvidenceBuilder(device_s=0.09, machine=_run().machine)
    line = run.line("train.py", 5, "out = net(x)")
    run.model(line)
    run.operator("aten.convolution", line, inputs=[(8, 3, 32, 32), (16, 3, 3, 3)], op_s=0.06)
    assert "not in TF32 already, are a small part" in _refusal(run)
    run.setting("cudnn_allow_tf32", "False")
    assert isinstance(next(iter(LEVER.propose(run.build(), ()))), Candidate)


def test_it_is_allowed_also_after_the_script_has_forbidden_it_and_not_afterwards() -> None:
    net, before = nn.Linear(3, 2), (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32)
    with pulled(LEVER, level="high") as hooks:
        assert torch.get_float32_matmul_precision() == "high"
        torch.set_float32_matmul_precision("highest")
        net(torch.randn(4, 3))
        assert torch.get_float32_matmul_precision() == "high"
        assert torch.backends.cudnn.allow_tf32
        assert hooks.done == [LEVER.id]
    assert before == (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32)


def test_an_unknown_level_is_refused() -> None:
    with pytest.raises(PlanError, match="lowest"), pulled(LEVER, level="lowest"):
        pass


def test_the_edit_is_one_line_below_the_imports() -> None:
    text = '"""Train."""\n\nimport torch\nfrom torch import nn\n\nnet = nn.Linear(3, 2)\n'
    line = 'torch.set_float32_matmul_precision("high")\n'
    assert edit(text, {"level": "high"}) == text.replace("\nnet", f"\n{line}\nnet")


def test_a_script_that_sets_it_is_not_edited() -> None:
    with pytest.raises(EditError, match="itself"):
        edit("import torch\ntorch.backends.cuda.matmul.allow_tf32 = False\n", {"level": "high"})
