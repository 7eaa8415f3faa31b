from __future__ import annotations

import pytest
from tests.evidence_builder import EvidenceBuilder, only_finding

from flatout.check.diagnosis import diagnose
from flatout.check.rules.overhead.python_line import RULE
from flatout.core.records.workload import LibraryFrame


def busy(*, seconds: float = 0.03, num_samples: int = 60, op_s: float = 0.002, phase: str = "other") -> EvidenceBuilder:
    """Line 33 of train.py, where a sampler found `seconds` of the step and operators ran for `op_s`."""
    run = EvidenceBuilder()
    line = run.line("train.py", 33, "rates.append(compute_rate(y.numpy()))")
    run.operator("aten.detach", line, op_s=op_s)
    run.sampled(line, seconds, num_samples=num_samples, phase=phase)
    return run


def test_a_line_busy_without_operators_is_named() -> None:
    finding = only_finding(RULE, busy(seconds=0.03, op_s=0.002).build())
    assert finding.where is not None
    assert (finding.where.line, finding.operators) == (33, (0,))
    assert finding.cost_s == pytest.approx(0.028)
    assert finding.basis == "estimate"


def test_samples_of_one_line_in_two_phases_add_up() -> None:
    run = busy(seconds=0.015, num_samples=5)
    run.sampled(run.line("train.py", 33), 0.015, num_samples=5, phase="forward")
    assert only_finding(RULE, run.build()).cost_s == pytest.approx(0.028)


def test_a_few_samples_are_noise() -> None:
    assert not list(RULE.check(busy(num_samples=2).build()))


def test_a_line_that_runs_its_operators_is_left_alone() -> None:
    assert not list(RULE.check(busy(seconds=0.03, op_s=0.028).build()))


@pytest.mark.parametrize("phase", ["data", "backward", "optimizer"])
def test_lines_of_phases_that_other_rules_watch_are_left_alone(phase: str) -> None:
    assert not list(RULE.check(busy(phase=phase).build()))


@pytest.mark.parametrize("waits", ["loader", "optimizer", "backward"])
def test_a_line_that_waits_on_purpose_is_left_alone(waits: str) -> None:
    run = busy()
    line = run.line("train.py", 33)
    {"loader": run.loader, "optimizer": run.optimizer, "backward": run.backward_at}[waits](line)
    assert not list(RULE.check(run.build()))


def test_a_line_that_waits_for_the_device_is_left_to_the_rule_on_host_reads() -> None:
    run = busy()
    run.host_read(run.line("train.py", 33), wait_s=0.02, on_device=True)
    assert not list(RULE.check(run.build()))


def test_host_time_beside_a_busy_device_is_left_alone() -> None:
    run = EvidenceBuilder(device_s=0.098)
    run.sampled(run.line("train.py", 33), 0.03)
    assert not list(RULE.check(run.build()))


def test_a_worker_is_left_alone() -> None:
    run = EvidenceBuilder()
    run.sampled(run.line("data.py", 9), 0.06, phase="other", process="worker")
    assert not list(RULE.check(run.build()))


def test_a_line_below_the_noise_is_not_reported() -> None:
    assert diagnose(busy(seconds=0.004, op_s=0.0).build(), [RULE]).findings == ()


def line_of(text: str, *, op: str = "aten.addmm", module: str = "Net.fc3") -> EvidenceBuilder:
    """A line that takes long beside its one operator."""
    run = EvidenceBuilder()
    line = run.line("model.py", 12, text)
    run.operator(op, line, module=module, op_s=0.002)
    run.sampled(line, 0.03, num_samples=60)
    return run


@pytest.mark.parametrize(
    ("text", "op"),
    [
        ("x = self.fc3(x)", "aten.addmm"),
        ("x = F.relu(self.fc3(x.float()))  # long(comment)", "aten.addmm"),
        ("return torch.sum(k[..., :i + 1] * (beta_i * dt), dim=-1)", "aten.sum"),
        ("y = (a * b).cumsum(0) + c", "aten.cumsum"),
        ("h = self.fc3(", "aten.addmm"),
    ],
)
def test_a_line_that_only_calls_modules_and_operators_is_left_alone(text: str, op: str) -> None:
    assert not list(RULE.check(line_of(text, op=op).build()))


@pytest.mark.parametrize(
    "text",
    [
        "x = self.fc3(torch.tensor(rows))",
        "x = self.fc3(prepare(x))",
        "x = self.fc3(x) * np.sum(w)",
        "for x in batches:",
        "n = sum(self.fc3(x) for x in xs)",
    ],
)
def test_a_line_that_calls_more_than_torch_is_named(text: str) -> None:
    assert list(RULE.check(line_of(text).build()))


def test_the_call_of_a_model_is_left_alone() -> None:
    run = line_of("logits = net(x)")
    assert list(RULE.check(run.build()))
    run.model(run.line("model.py", 12))
    assert not list(RULE.check(run.build()))


@pytest.mark.parametrize(("is_model", "is_named"), [(True, False), (False, True)], ids=["a model", "a function"])
def test_the_call_of_a_model_whose_operators_are_on_lines_of_its_own_is_left_alone(
    is_model: bool, is_named: bool
) -> None:
    run = EvidenceBuilder()
    line = run.line("generate.py", 86, "output, hidden = model(input, hidden)")
    if is_model:
        run.model(line)
    run.operator("aten.addmm", run.line("model.py", 52), op_s=0.01)
    run.sampled(line, 0.03, num_samples=60, phase="other")
    assert bool(list(RULE.check(run.build()))) == is_named


@pytest.mark.parametrize("text", ["loss.backward()", "state, reward = env.step(action)"])
@pytest.mark.parametrize(
    ("own", "below"), [("{}", ""), ("model.learn(steps)", "{}"), ("{}", "observe()")], ids=["own", "below", "above"]
)
def test_what_steps_or_goes_backward_is_no_python_to_move(text: str, own: str, below: str) -> None:
    run = EvidenceBuilder()
    via = (LibraryFrame(file="gymnasium/core.py", line=175, text=below.format(text)),) if below else ()
    line = run.line("train.py", 33, own.format(text), via=via)
    run.sampled(line, 0.03, num_samples=60, phase="other")
    assert not list(RULE.check(run.build()))
