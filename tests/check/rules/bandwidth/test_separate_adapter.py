from __future__ import annotations

import pytest
from tests.evidence_builder import EvidenceBuilder, only_finding, proposed

from flatout.check.diagnosis import diagnose
from flatout.check.rules.bandwidth.separate_adapter import RULE
from flatout.core.records.trial import TimeLoraLinear

_TRIAL = TimeLoraLinear(
    rows=64, in_features=32, out_features=48, rank=4, dtype="float32", bias=True, frozen=True, backward=True
)


def adapted(
    *,
    rows: int = 64,
    rank: int = 4,
    is_frozen: bool = True,
    is_scaled: bool = True,
    is_one_input: bool = True,
    is_nonlinear: bool = False,
    is_swapped: bool = False,
) -> EvidenceBuilder:
    """A linear layer of 32 to 48 on line 12, an adapter on line 13, and their sum on line 14."""
    run = EvidenceBuilder()
    norm = run.operator("aten.native_layer_norm", run.line("model.py", 9), inputs=[(rows, 32)], output=(rows, 32))
    x = run.call(norm)
    line, low, total = (run.line("model.py", n) for n in (12, 13, 14))
    wide = 2 * rows * 32 * 48
    layer = run.operator(
        "aten.addmm", line, inputs=[(48,), (rows, 32), (32, 48)], output=(rows, 48), op_s=0.01, flop=wide
    )
    down = run.operator("aten.mm", low, inputs=[(rows, 32), (32, rank)], output=(rows, rank), op_s=0.004)
    up = run.operator("aten.mm", low, inputs=[(rows, rank), (rank, 48)], output=(rows, 48), op_s=0.004)
    scale = run.operator("aten.mul", total, inputs=[(rows, 48)], output=(rows, 48), op_s=0.004)
    add = run.operator("aten.add", total, inputs=[(rows, 48), (rows, 48)], output=(rows, 48), op_s=0.004)
    for inner, outer in ((rows, 48), (48, rows))[: 1 if is_frozen else 2]:
        other = 32
        run.operator(
            "aten.mm",
            line,
            inputs=[(inner, outer), (outer, other)],
            output=(inner, other),
            op_s=0.01,
            phase="backward",
            flop=wide,
        )
    first = run.call(layer, -1, x, -1)
    second = run.call(down, x if is_one_input else run.call(norm), -1)
    if is_nonlinear:
        second = run.call(run.operator("aten.relu", low, inputs=[(rows, rank)], output=(rows, rank)), second)
    second = run.call(up, second, -1)
    if is_scaled:
        second = run.call(scale, second)
    run.call(add, *((second, first) if is_swapped else (first, second)))
    return run


@pytest.mark.parametrize("is_scaled", [True, False])
@pytest.mark.parametrize("is_swapped", [True, False])
@pytest.mark.parametrize("is_frozen", [True, False])
def test_an_adapter_is_tried_in_the_weight(is_scaled: bool, is_swapped: bool, is_frozen: bool) -> None:
    run = adapted(is_scaled=is_scaled, is_swapped=is_swapped, is_frozen=is_frozen)
    (trial,) = proposed(RULE, run.build())
    assert trial == TimeLoraLinear(**{f: getattr(_TRIAL, f) for f in _TRIAL.__struct_fields__} | {"frozen": is_frozen})
    run.tried(trial, kept=0.7)
    finding = only_finding(RULE, run.build())
    assert finding.where is not None
    assert finding.where.line == 14
    assert [s.line for s in finding.also] == [12, 13]
    assert "adapters of rank 4" in finding.because
    assert finding.levers == ("graph.merge-adapter",)
    cost_s = 0.01 * (2 if is_frozen else 3) + 0.004 * 4
    assert finding.cost_s == pytest.approx(cost_s, rel=0.1)


def test_what_is_no_adapter_is_left_alone() -> None:
    for run in (adapted(rank=16), adapted(is_one_input=False), adapted(is_nonlinear=True)):
        assert not proposed(RULE, run.build())


def test_few_rows_are_left_alone() -> None:
    assert not proposed(RULE, adapted(rows=19).build())
    assert proposed(RULE, adapted(rows=20).build())


def test_a_trial_without_gain_is_not_reported() -> None:
    run = adapted()
    run.tried(*proposed(RULE, run.build()), kept=1.0)
    assert diagnose(run.build(), [RULE]).findings == ()
