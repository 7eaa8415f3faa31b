from __future__ import annotations

import pytest
from tests.evidence_builder import EvidenceBuilder

from flatout.check.rules.compute.tiny_batchnorm import RULE


def normalised(
    *shape: int, training: str = "True", calls: float = 1.0, op: str = "aten.native_batch_norm"
) -> EvidenceBuilder:
    run = EvidenceBuilder()
    line = run.line("model.py", 9, "x = self.norm(x)")
    run.operator(op, line, inputs=[shape], output=shape, scalars=f"{training}, 0.1, 1e-05", calls=calls)
    return run


@pytest.mark.parametrize("shape", [(2, 64), (1, 64, 1, 1), (3, 64)])
def test_too_few_values_are_told(shape: tuple[int, ...]) -> None:
    assert RULE.note is not None
    (note,) = RULE.note(normalised(*shape).build())
    assert note.where is not None
    assert note.where.line == 9


@pytest.mark.parametrize(
    "run",
    [
        normalised(4, 64),
        normalised(1, 64, 8, 8),
        normalised(2, 64, training="False"),
        normalised(2, 64, calls=0.3),
    ],
)
def test_enough_values_evaluation_and_a_last_batch_are_left_alone(run: EvidenceBuilder) -> None:
    assert RULE.note is not None
    assert not list(RULE.note(run.build()))
    assert not list(RULE.check(run.build()))
