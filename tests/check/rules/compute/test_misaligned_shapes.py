from __future__ import annotations

import pytest
from tests.evidence_builder import EvidenceBuilder, only_finding, proposed, tensor

from flatout.check.rules.compute.misaligned_shapes import RULE, padded_size
from flatout.core.records.evidence import TensorSpec
from flatout.core.records.trial import TimePaddedProduct


def head(*, vocabulary: int = 50257, dtype: str = "bfloat16", device_s: float | None = 0.098) -> EvidenceBuilder:
    """A language model's head, forward and backward, 40 of 100 ms."""
    run = EvidenceBuilder(device_s=device_s)
    line = run.line("model.py", 30, "logits = self.head(x)")
    weight = TensorSpec(shape=(768, vocabulary), dtype=dtype, is_contiguous=False)
    run.operator(
        "aten.mm",
        line,
        inputs=[tensor(8192, 768, dtype=dtype), weight],
        output=tensor(8192, vocabulary, dtype=dtype),
        op_s=0.02,
    )
    grad, x = tensor(vocabulary, 8192, dtype=dtype), tensor(8192, 768, dtype=dtype)
    run.operator(
        "aten.mm", line, inputs=[grad, x], output=tensor(vocabulary, 768, dtype=dtype), op_s=0.02, phase="backward"
    )
    return run


def test_padding_a_vocabulary_is_tried_and_priced() -> None:
    run = head()
    trials = proposed(RULE, run.build())
    assert {t.padded for t in trials if isinstance(t, TimePaddedProduct)} == {(8192, 768, 50304), (50304, 8192, 768)}
    run.tried(*trials, kept=0.5)
    finding = only_finding(RULE, run.build())
    assert finding.where is not None
    assert finding.where.line == 30
    assert "50257 -> 50304" in finding.because
    assert sum(finding.saved_s) / 2 == pytest.approx(0.02)


def test_a_trial_that_gains_nothing_gives_no_finding() -> None:
    run = head()
    run.tried(*proposed(RULE, run.build()), kept=1.0)
    assert list(RULE.check(run.build())) == []


def test_a_refused_trial_gives_no_finding() -> None:
    run = head()
    run.refused(*proposed(RULE, run.build()), why="out of memory")
    assert list(RULE.check(run.build())) == []


@pytest.mark.parametrize(
    "run",
    [head(vocabulary=50304), head(dtype="float32"), head(device_s=None), head(device_s=0.3)],
    ids=["aligned", "float32", "processor", "host-bound"],
)
def test_near_misses_are_not_even_tried(run: EvidenceBuilder) -> None:
    if run.steps.device_s == 0.3:
        run.operators = [
            type(o)(**{**{f: getattr(o, f) for f in o.__struct_fields__}, "bound": "host"}) for o in run.operators
        ]
    assert proposed(RULE, run.build()) == []


def test_sizes_are_padded_to_the_next_multiple() -> None:
    assert [padded_size(n) for n in (50257, 3620, 4096, 80, 81, 1000)] == [50304, 3648, 4096, 80, 88, 1000]
