from __future__ import annotations

from tests.evidence_builder import EvidenceBuilder, only_finding, proposed

from flatout.check.rules.overhead.parameter_loop import RULE
from flatout.check.rules.overhead.python_loop import RULE as PYTHON_LOOP
from flatout.core.records.trial import TimeForeach

WEIGHT, BIAS = (64, 64), (64,)


def averaged(*, calls: float = 20, shapes: str = "64x64,64", source: str = "loop") -> EvidenceBuilder:
    """An average of the weights by a loop on line 41; the optimizer holds 40 tensors of two shapes."""
    run = EvidenceBuilder()
    step = run.line("train.py", 39, "optimizer.step()", loops=(20,))
    run.optimizer(step)
    run.fact("parameter-shapes", step, value=40, text=shapes)
    line = run.line("train.py", 41, "average.mul_(0.99).add_(weight, alpha=0.01)", loops=(20, 40))
    for shape in (WEIGHT, BIAS):
        for op in ("aten.mul_", "aten.add_"):
            row = run.operator(
                op,
                line if source == "loop" else step,
                inputs=[shape],
                output=shape,
                calls=calls,
                op_s=0.003,
                phase="other",
            )
            for _ in range(int(calls)):
                run.call(row, -1)
    return run


def test_a_loop_over_the_parameters_is_tried_with_foreach() -> None:
    run = averaged()
    (trial,) = proposed(RULE, run.build())
    assert trial == TimeForeach(operators=(0, 1, 2, 3))
    run.tried(trial, kept=0.3)
    finding = only_finding(RULE, run.build())
    assert finding.where is not None
    assert finding.where.line == 41
    assert "lerp" in finding.edit


def test_the_general_rule_of_loops_leaves_it_to_this_one() -> None:
    assert not list(PYTHON_LOOP.check(averaged().build()))


def test_other_shapes_a_few_tensors_and_torchs_own_optimizer_are_left_alone() -> None:
    for run in (averaged(shapes="128x128,128"), averaged(calls=3), averaged(source="optimizer")):
        assert not proposed(RULE, run.build())
