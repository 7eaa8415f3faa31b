from __future__ import annotations

import msgspec
import pytest
from tests.evidence_builder import EvidenceBuilder, only_finding, proposed

from flatout.check.diagnosis import diagnose
from flatout.check.rules.bandwidth.growing_cat import RULE
from flatout.check.timed_step import in_timed_step
from flatout.core.records.trial import TimeGrowingCat


def gathered(*, pieces: int, seed: int = 1, cat_s: float = 0.02, to_its_own_result: bool = True) -> EvidenceBuilder:
    """A loop that appends `pieces` rows to a tensor of `seed` rows, with its backward, taking `cat_s` seconds in all."""
    run = EvidenceBuilder()
    step = run.line("model.py", 19, "h = torch.tanh(h)", loops=(18,))
    line = run.line("model.py", 20, "out = torch.cat([out, h], dim=1)", loops=(18,))
    tanh = run.operator("aten.tanh", step, output=(8, 1, 64), calls=pieces)
    grown = run.call(tanh)
    for n in range(seed + 1, seed + pieces + 1):
        inputs = [(8, n - 1, 64), (8, 1, 64)]
        row = run.operator("aten.cat", line, inputs=inputs, output=(8, n, 64), op_s=0.5 * cat_s / pieces)
        piece = run.call(tanh)
        done = run.call(row, grown, piece)
        grown = done if to_its_own_result else piece
    run.operator("aten.slice_backward", line, output=(8, pieces, 64), op_s=0.5 * cat_s, phase="backward")
    return run


def banked(*, sizes: tuple[int, ...], piece: int = 32, cat_s: float = 0.02) -> EvidenceBuilder:
    """One cat a step whose first input had these numbers of rows in the steps looked at."""
    run = EvidenceBuilder()
    line = run.line("train.py", 40, "bank = torch.cat([bank, z.detach()])", loops=(30,))
    for n in sizes:
        inputs = [(n, 64), (piece, 64)]
        share = 1 / len(sizes)
        run.operator("aten.cat", line, inputs=inputs, output=(n + piece, 64), calls=share, op_s=share * cat_s)
    return run


def test_a_tensor_grown_piece_by_piece_is_tried_against_one_cat() -> None:
    run = gathered(pieces=30)

    trials = proposed(RULE, run.build())

    assert trials == [TimeGrowingCat(piece=(8, 1, 64), dim=1, count=31, dtype="float32", backward=True)]


def test_the_trial_prices_the_cat_and_its_backward() -> None:
    run = gathered(pieces=30, cat_s=0.02)
    run.tried(*proposed(RULE, run.build()), kept=0.2)

    finding = only_finding(RULE, run.build())

    assert finding.where is not None
    assert (finding.where.line, finding.basis) == (20, "trial")
    assert finding.cost_s == pytest.approx(0.02)
    assert finding.saved_s[0] < 0.8 * 0.02 < finding.saved_s[1]


def test_gradients_of_the_pieces_that_are_read_back_are_part_of_the_cost() -> None:
    run = gathered(pieces=30, cat_s=0.02)
    read = run.line("model.py", 21, "h = out[:, -1]", loops=(18,))
    first = run.operator("aten.select", read, inputs=[(8, 30, 64)], output=(8, 64), op_s=1e-6)
    run.call(first, len(run.calls) - 1)
    run.operator("aten.select_backward", read, output=(8, 30, 64), op_s=0.008, phase="backward")
    run.operator("aten.view", read, output=(8, 64), op_s=0.001, phase="backward")
    run.tried(*proposed(RULE, run.build()), kept=0.2)

    finding = only_finding(RULE, run.build())

    assert finding.cost_s == pytest.approx(0.028)
    assert finding.saved_s[0] < 0.8 * 0.02 + 0.008 < finding.saved_s[1]
    assert "read the last piece from the list" in finding.edit


def test_gradients_of_long_reads_stay_with_their_line() -> None:
    run = gathered(pieces=30, cat_s=0.02)
    read = run.line("model.py", 21, "window = out[:, -16:]", loops=(18,))
    first = run.operator("aten.slice", read, inputs=[(8, 30, 64)], output=(8, 16, 64), op_s=1e-6)
    run.call(first, len(run.calls) - 1)
    run.operator("aten.slice_backward", read, output=(8, 30, 64), op_s=0.008, phase="backward")
    run.tried(*proposed(RULE, run.build()), kept=0.2)

    assert only_finding(RULE, run.build()).cost_s == pytest.approx(0.02)


def test_nothing_is_said_before_the_trial_has_run() -> None:
    assert not list(RULE.check(gathered(pieces=30).build()))


def test_a_trial_without_gain_is_not_reported() -> None:
    run = gathered(pieces=30)
    run.tried(*proposed(RULE, run.build()), kept=1.1)
    assert diagnose(run.build(), [RULE]).findings == ()


def test_a_few_pieces_are_left_alone() -> None:
    run = gathered(pieces=4)
    assert not proposed(RULE, run.build())
    assert not list(RULE.check(run.build()))


def test_many_cats_of_unrelated_tensors_are_left_alone() -> None:
    run = gathered(pieces=30, to_its_own_result=False)
    assert not proposed(RULE, run.build())
    assert not list(RULE.check(run.build()))


def test_a_cheap_growing_cat_is_not_worth_a_trial() -> None:
    assert not proposed(RULE, gathered(pieces=30, cat_s=0.0005).build())


def test_a_tensor_that_grows_from_step_to_step_is_found_without_a_trial() -> None:
    run = banked(sizes=(640, 672, 704, 736), cat_s=0.02)

    finding = only_finding(RULE, run.build())

    assert finding.where is not None
    assert (finding.where.line, finding.basis) == (40, "estimate")
    assert finding.cost_s == pytest.approx(0.02)
    assert diagnose(run.build(), [RULE]).findings


def test_growth_over_the_steps_costs_what_the_sampler_saw_of_all_steps() -> None:
    run = banked(sizes=(640, 672, 704, 736), cat_s=0.001)  # the deep steps came early
    run.sampled(run.line("train.py", 40), 0.03)
    assert only_finding(RULE, run.build()).cost_s == pytest.approx(0.03)


def test_recorded_steps_that_had_grown_already_are_brought_to_the_timed_one() -> None:
    evidence = banked(sizes=(640, 672, 704, 736), cat_s=0.02).build()
    step_s = evidence.steps.step_s
    late = msgspec.structs.replace(evidence.observing, nearby_step_s=2 * step_s)
    early = msgspec.structs.replace(evidence.observing, nearby_step_s=step_s / 2)

    for observing, cost_s in ((late, 0.01), (early, 0.04)):
        finding = only_finding(RULE, in_timed_step(msgspec.structs.replace(evidence, observing=observing)))
        assert finding.cost_s == pytest.approx(cost_s)


def test_a_cat_of_equal_size_in_every_step_is_left_alone() -> None:
    assert not list(RULE.check(banked(sizes=(640, 640, 640, 640)).build()))


def test_a_cat_of_ragged_batches_is_left_alone() -> None:
    run = EvidenceBuilder()
    line = run.line("train.py", 40, "both = torch.cat([left, right], dim=1)")
    for n in (90, 120, 70):
        run.operator("aten.cat", line, inputs=[(32, n), (32, n // 2)], output=(32, n + n // 2), calls=1 / 3, op_s=0.01)
    assert not list(RULE.check(run.build()))


def test_a_few_pieces_after_a_long_start_are_left_alone() -> None:
    run = gathered(pieces=3, seed=10)  # a prompt of 10 tokens and 3 more, in every step
    assert not list(RULE.check(run.build()))
