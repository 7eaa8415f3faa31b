from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
import torch.nn.functional as F
from tests.evidence_builder import MACHINE, EvidenceBuilder
from tests.lever_tools import pulled
from torch import Tensor, nn

from flatout.core.errors import EditError, PlanError
from flatout.core.records.evidence import Evidence
from flatout.core.records.lever import Candidate, Refusal
from flatout.core.records.trial import TimeModel, TrialResult
from flatout.tune.levers.workload.mixed_precision import LEVER, edit
from flatout.tune.levers.workload.tf32 import LEVER as TF32


def _run(*, rate: float = 4.0, product_s: float = 0.06) -> EvidenceBuilder:
    rates = {"float32": 1e12, "bfloat16": rate * 1e12}
    run = EvidenceBuilder(device_s=0.09, machine=msgspec.structs.replace(MACHINE, matmul_flop_per_s=rates))
    line = run.line("train.py", 5, "out = net(x)")
    run.model(line)
    run.operator("aten.mm", line, inputs=[(64, 64), (64, 64)], op_s=product_s)
    return run


def _refusal(evidence: Evidence) -> str:
    [said] = LEVER.propose(evidence, ())
    assert isinstance(said, Refusal)
    return said.because


def test_float32_products_on_a_machine_with_units_for_bfloat16_are_offered() -> None:
    [candidate] = LEVER.propose(_run().build(), ())
    assert isinstance(candidate, Candidate)
    assert 0 < candidate.saved_s[0] < candidate.saved_s[1] < 0.1
    assert LEVER.dtype is not None and LEVER.dtype(candidate.parameters) == "bfloat16"


def test_what_the_trial_saved_is_what_is_promised() -> None:
    run = _run()
    trial = TimeModel(model=0, variant="bf16-autocast", backward=True)
    run.trial(TrialResult(trial=trial, now_s=0.09, cured_s=0.03))
    [candidate] = LEVER.propose(run.build(), ())
    assert isinstance(candidate, Candidate)
    assert candidate.saved_s[0] < 0.06 < candidate.saved_s[1]


def test_where_tf32_alone_was_tried_it_promises_no_less() -> None:
    """Steps of a large model leave no time to try both, and what promises more is taken first."""
    rates = {"float32": 50e12, "tf32": 400e12, "bfloat16": 700e12}
    run = EvidenceBuilder(device_s=0.09, machine=msgspec.structs.replace(MACHINE, matmul_flop_per_s=rates))
    line = run.line("train.py", 5, "out = net(x)")
    run.model(line)
    run.operator("aten.mm", line, inputs=[(64, 64), (64, 64)], op_s=0.06)
    run.trial(TrialResult(trial=TimeModel(model=0, variant="tf32", backward=True), now_s=0.09, cured_s=0.045))
    [candidate] = LEVER.propose(run.build(), ())
    [other] = TF32.propose(run.build(), ())
    assert isinstance(candidate, Candidate) and isinstance(other, Candidate)
    assert candidate.saved_s[0] >= other.saved_s[0] and candidate.saved_s[1] > other.saved_s[1]


def test_a_machine_without_units_a_model_without_products_and_autocast_are_refused() -> None:
    assert "no units" in _refusal(_run(rate=1.1).build())
    assert "small part" in _refusal(_run(product_s=0.001).build())
    run = _run()
    run.fact("autocast", text="cuda:bfloat16")
    assert "already" in _refusal(run.build())


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(32, 16)
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor) -> dict[str, Any]:
        h = self.body(x)
        self.seen.append(h.dtype)
        return {"logits": h, "again": (h, 3)}


def test_the_model_computes_in_bfloat16_and_the_loss_outside_in_float32() -> None:
    torch.manual_seed(0)
    net, x, y = _Net(), torch.randn(64, 32), torch.randn(64, 16)
    exact = F.mse_loss(x.double() @ net.body.weight.double().T + net.body.bias.double(), y.double())
    with pulled(LEVER, dtype="bfloat16") as hooks:
        assert not torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
        output = net(x)
        loss = F.mse_loss(output["logits"], y)
        loss.backward()
        assert hooks.done == [LEVER.id]
    assert net.seen == [torch.bfloat16]
    assert output["logits"].dtype is output["again"][0].dtype is loss.dtype is torch.float32
    assert net.body.weight.grad is not None and net.body.weight.grad.dtype is torch.float32
    assert 0 < abs(loss.item() - exact.item()) < 0.01 * exact.item()
    assert net(x)["logits"].dtype is torch.float32 and net.seen[-1] is torch.float32


def test_what_was_allowed_before_is_allowed_afterwards() -> None:
    backend = torch.backends.cuda.matmul
    before = backend.allow_bf16_reduced_precision_reduction, backend.allow_fp16_reduced_precision_reduction
    with pulled(LEVER):
        pass
    assert before == (
        backend.allow_bf16_reduced_precision_reduction,
        backend.allow_fp16_reduced_precision_reduction,
    )


def test_float16_is_refused_since_it_needs_a_scaler() -> None:
    with pytest.raises(PlanError, match="scaler"), pulled(LEVER, dtype="float16"):
        pass


_SCRIPT = """\
import torch
import torch.nn.functional as F

torch.manual_seed(0)
net = torch.nn.Linear(32, 16)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(3):
    x, y = torch.randn(64, 32), torch.randn(64, 16)
    # the model
    out = net(x)
    loss = F.mse_loss(out, y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_forward_and_loss_are_put_under_autocast() -> None:
    parameters = {"file": "train.py", "function": "<module>", "code": "out = net(x)", "device": "cpu"}
    changed = edit(_SCRIPT, dict(parameters))
    assert (
        """\
    # the model
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = net(x)
        loss = F.mse_loss(out, y)
    optimizer.zero_grad()
"""
        in changed
    )
    before: dict[str, Any] = {}
    after: dict[str, Any] = {}
    exec(_SCRIPT, before)
    exec(changed, after)
    assert after["out"].dtype is torch.bfloat16
    assert torch.allclose(before["net"].weight, after["net"].weight, atol=1e-2)


def test_all_models_that_a_loop_calls_are_put_under_autocast() -> None:
    text = """\
import torch
from torch import nn


class Part(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        return self.inner(x)


torch.manual_seed(0)
actor, critic = Part(), Part()
policy, steps = Part(), 2
x = torch.randn(4, 8)
for step in range(steps):
    with torch.no_grad():
        old = policy(x)
    a = policy(x)
    v = critic(x)
    total = (a + v).sum()
    total.backward()
print(policy(x))
"""
    at = {"file": "train.py", "function": "<module>", "code": "v = critic(x)", "device": "cpu"}
    after = edit(text, dict(at))
    assert after.count("torch.autocast") == 2
    assert (
        """\
    with torch.no_grad():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            old = policy(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        a = policy(x)
        v = critic(x)
        total = (a + v).sum()
    total.backward()
"""
        in after
    )
    exec(after, {})


def test_an_edit_is_refused_where_the_call_is_not_known_or_autocast_is_there() -> None:
    with pytest.raises(EditError, match="not found"):
        edit(_SCRIPT, {})
    at = {"file": "train.py", "function": "<module>", "code": "out = net(x)"}
    with pytest.raises(EditError, match="autocast"):
        edit("from torch import autocast\n" + _SCRIPT, dict(at))
    with pytest.raises(EditError, match="no plain statement"):
        edit("for y in net(x):\n    print(y)\n", {**at, "code": "for y in net(x):"})


def test_a_call_whose_result_nobody_reads_is_not_the_models() -> None:
    text = "import torch\nfrom transformers import Trainer\ntrainer = Trainer()\ntrainer.train()\n"
    with pytest.raises(EditError, match="more than the model"):
        edit(text, {"file": "train.py", "function": "<module>", "code": "trainer.train()", "device": "cpu"})


def test_frozen_weights_are_held_in_16_bits_where_they_are_most_of_the_model() -> None:
    run = _run()
    line = run.line("train.py", 9, "optimizer.step()")
    run.optimizer(line, num_elements=10)
    [candidate] = LEVER.propose(run.build(), ())
    assert isinstance(candidate, Candidate)
    whole = run.build().models[0].num_parameters
    assert candidate.parameters.get("frozen") is (True if whole > 20 else None)
    assert candidate.saved_bytes == 2 * (whole - 10)

    run.optimizer(line, num_elements=whole - 10)  # all but nothing is trained
    [candidate] = LEVER.propose(run.build(), ())
    assert isinstance(candidate, Candidate) and "frozen" not in candidate.parameters and candidate.saved_bytes == 0
    [candidate] = LEVER.propose(_run().build(), ())  # nothing is trained: it only computes
    assert isinstance(candidate, Candidate) and "frozen" not in candidate.parameters


def test_frozen_layers_lie_in_bfloat16_while_the_script_runs() -> None:
    net = _Net()
    net.body.requires_grad_(False)
    with pulled(LEVER, dtype="bfloat16", frozen=True) as hooks:
        net(torch.randn(64, 32))
        assert net.body.weight.dtype is torch.bfloat16
        assert hooks.done == [LEVER.id]
    assert net.body.weight.dtype is torch.float32


def test_the_edit_holds_frozen_weights_before_the_optimizer_is_made() -> None:
    script = _SCRIPT.replace("optimizer = ", "net.weight.requires_grad_(False)\noptimizer = ")
    parameters = {"file": "train.py", "function": "<module>", "code": "out = net(x)", "device": "cpu", "frozen": True}
    changed = edit(script, dict(parameters))
    assert "from flatout import hold_frozen_weights\n" in changed
    assert "hold_frozen_weights(net)\noptimizer = torch.optim.SGD(net.parameters(), lr=0.1)\n" in changed
    names: dict[str, Any] = {}
    exec(changed, names)
    with pytest.raises(EditError, match="no optimizer of a model"):
        edit(script.replace("net.parameters()", "weights"), dict(parameters))
