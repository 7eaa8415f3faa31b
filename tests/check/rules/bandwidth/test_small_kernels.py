from __future__ import annotations

from tests.check.rules.device_steps import GPU, with_device
from tests.evidence_builder import EvidenceBuilder, only_finding

from flatout.check.rules.bandwidth.small_kernels import RULE
from flatout.core.records.device import DeviceKernel
from flatout.core.records.evidence import Evidence


def chain(
    *, launches: int = 1000, seconds: float = 0.03, operators: int = 4, device_s: float = 0.098, phase: str = "forward"
) -> Evidence:
    """`operators` pointwise operators on one line, each with a quarter of the launches and of the time."""
    run = EvidenceBuilder(device_s=device_s, machine=GPU)
    line = run.line("model.py", 17, "return x * torch.sigmoid(1.702 * x) + b")
    names = ["aten.mul", "aten.sigmoid", "aten.add", "aten.exp"][:operators]
    for name in names:
        run.operator(name, line, inputs=[(1000, 100)], output=(1000, 100), calls=launches / 4, op_s=seconds / 4)
    kernels = [
        DeviceKernel(
            name="vectorized_elementwise_kernel",
            source=line,
            phase=phase,
            num_launches=launches // 4,
            seconds=seconds / 4,
            op=n,
        )
        for n in names
    ]
    return with_device(run, kernels=kernels)


def test_a_line_of_many_short_kernels_is_priced_by_traffic() -> None:
    finding = only_finding(RULE, chain())
    assert finding.where is not None
    assert finding.where.line == 17
    assert 0.02 < finding.saved_s[1] < 0.03
    assert len(finding.operators) == 4


def test_long_kernels_are_left_alone() -> None:
    assert list(RULE.check(chain(launches=100, seconds=0.03))) == []


def test_one_operator_on_many_tensors_cannot_be_fused() -> None:
    assert list(RULE.check(chain(operators=1))) == []


def test_the_optimizers_kernels_are_not_its_business() -> None:
    assert list(RULE.check(chain(phase="optimizer"))) == []


def test_behind_a_late_host_short_kernels_cost_nothing() -> None:
    assert list(RULE.check(chain(device_s=0.05))) == []
