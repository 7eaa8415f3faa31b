from __future__ import annotations

import msgspec
import pytest
from tests.evidence_builder import EvidenceBuilder, only_finding, proposed

from flatout.check.diagnosis import diagnose
from flatout.check.rules.compute.padding import RULE
from flatout.core.records.trial import TimeModel, TrialResult
from flatout.core.records.workload import Source


def padded(
    *,
    padding_fraction: float = 0.6,
    longest_fraction: float = 0.75,
    signs: tuple[str, ...] = ("integers", "padding_idx"),
    has_source: bool = True,
) -> EvidenceBuilder:
    """Tokens 200 wide, made on line 22 of data.py and fed to a model on line 20 of train.py."""
    run = EvidenceBuilder(forward=0.04, backward=0.05)
    made = run.line("data.py", 22, "tokens[i, :len(row)] = row")
    run.model(run.line("train.py", 20))
    run.padding(
        made if has_source else -1, padding_fraction=padding_fraction, longest_fraction=longest_fraction, signs=signs
    )
    return run


def cropped(*lengths: int) -> TimeModel:
    return TimeModel(model=0, variant="cropped", backward=True, length=200, lengths=lengths)


MEAN, LONGEST = cropped(64, 80, 96), cropped(144, 160, 176)
"""80 and 150 positions, rounded up to a multiple of 16."""


def test_the_batch_is_tried_around_its_mean_length_and_its_longest_row() -> None:
    run = padded(padding_fraction=0.6, longest_fraction=0.75)
    assert proposed(RULE, run.build()) == [MEAN, LONGEST]


def test_rows_that_fill_the_width_are_tried_at_the_mean_length_alone() -> None:
    run = padded(padding_fraction=0.6, longest_fraction=1.0)
    assert proposed(RULE, run.build()) == [MEAN]


def test_no_length_is_tried_beyond_the_width() -> None:
    run = padded(padding_fraction=0.6, longest_fraction=0.94)
    assert proposed(RULE, run.build()) == [MEAN, cropped(176, 192, 200)]


def test_lengths_are_rounded_up_so_that_few_shapes_occur() -> None:
    run = padded()
    run.tried(MEAN, kept=0.4)
    assert "rounded up to a multiple of 16" in only_finding(RULE, run.build()).edit


@pytest.mark.parametrize(("new_s", "is_told"), [(0.5, True), (0.045, False)])
def test_what_a_new_length_takes_is_told_where_it_is_much(new_s: float, is_told: bool) -> None:
    run = padded()
    run.trial(TrialResult(trial=MEAN, now_s=0.1, cured_s=0.04, parts={"new_length": new_s}))
    assert ("first batch of a new length takes 500.00 ms" in only_finding(RULE, run.build()).because) == is_told


def test_the_range_lies_between_the_longest_row_and_the_mean_length() -> None:
    run = padded()
    run.tried(MEAN, kept=0.4)
    run.tried(LONGEST, kept=0.8)

    finding = only_finding(RULE, run.build())

    assert finding.where is not None
    assert (finding.where.line, finding.basis) == (22, "trial")
    low, high = finding.saved_s
    assert low == pytest.approx(0.2 * 0.09)
    assert low < high < 0.6 * 0.09


def test_one_trial_still_gives_a_range() -> None:
    run = padded(longest_fraction=1.0)
    run.tried(MEAN, kept=0.4)
    low, high = only_finding(RULE, run.build()).saved_s
    assert 0 < low < high < 0.6 * 0.09


def test_the_collate_function_is_named_when_the_tensor_was_not_seen_made() -> None:
    run = padded(has_source=False)
    run.loader(run.line("train.py", 16), collate=run.line("data.py", 40, "def pad(rows):"), has_own_collate=True)
    run.tried(*proposed(RULE, run.build()), kept=0.5)

    where = only_finding(RULE, run.build()).where

    assert where is not None
    assert where.line == 40


def test_trailing_constants_without_a_sign_of_padding_are_left_alone() -> None:
    run = padded(signs=())
    assert not proposed(RULE, run.build())
    assert not list(RULE.check(run.build()))


def test_a_little_padding_is_left_alone() -> None:
    assert not proposed(RULE, padded(padding_fraction=0.05, longest_fraction=1.0).build())


def test_a_model_that_refuses_shorter_input_is_left_alone_and_the_reason_told() -> None:
    run = padded()
    run.refused(*proposed(RULE, run.build()), why="the positions are 200 long")

    diagnosis = diagnose(run.build(), [RULE])

    assert diagnosis.findings == ()
    assert any("the positions are 200 long" in reason for reason in diagnosis.refused)


@pytest.mark.parametrize("kept", [1.0, 1.2])
def test_a_model_that_gets_no_faster_is_left_alone(kept: float) -> None:
    run = padded()
    run.tried(*proposed(RULE, run.build()), kept=kept)
    assert diagnose(run.build(), [RULE]).findings == ()


def test_a_batch_that_is_packed_is_no_waste() -> None:
    run = EvidenceBuilder()
    line = run.line("train.py", 30, "x = pad_sequence(rows, batch_first=True)")
    run.model(line)
    run.padding(line)
    assert proposed(RULE, run.build())
    run.operator("aten._pack_padded_sequence", line, inputs=[(32, 200, 16)], output=(1800, 16), op_s=0.0001)
    assert not proposed(RULE, run.build())


@pytest.mark.parametrize(
    ("longest", "starts"), [(1.0, "batch rows of similar"), (0.75, "pad each batch to its own longest")]
)
def test_where_the_longest_row_fills_the_width_only_bucketing_is_left(longest: float, starts: str) -> None:
    run = padded(longest_fraction=longest)
    run.tried(*proposed(RULE, run.build()), kept=0.5)
    edit = only_finding(RULE, run.build()).edit
    assert edit.startswith(starts)
    assert "a row's last position" in edit


def test_nothing_is_rounded_up_to_a_multiple_of_one() -> None:
    run = EvidenceBuilder(forward=0.04, backward=0.05)
    run.model(run.line("train.py", 20))
    run.padding(run.line("data.py", 22), shape=(32, 11))
    run.tried(*proposed(RULE, run.build()), kept=0.5)
    assert "multiple" not in only_finding(RULE, run.build()).edit


def test_a_packages_own_collate_function_is_not_where_rows_are_padded() -> None:
    run = padded(has_source=False)
    run.loader(run.line("train.py", 16, "for batch in loader:"))
    installed = Source(file="/venv/lib/python3.11/site-packages/fit.py", line=249, text="def identity(batch):")
    run.sources.append(installed)
    run.loaders[0] = msgspec.structs.replace(run.loaders[0], collate=len(run.sources) - 1, has_own_collate=True)
    run.tried(*proposed(RULE, run.build()), kept=0.5)
    where = only_finding(RULE, run.build()).where
    assert where is not None
    assert where.line == 16


def test_the_loader_that_is_waited_for_pads() -> None:
    run = padded(has_source=False)
    run.loader(run.line("fit.py", 278, "for batch in data_loader:"), wait_s=1e-5)
    run.loader(run.line("train.py", 16, "trainer.train()"), wait_s=1e-2)
    run.loaders[0] = msgspec.structs.replace(run.loaders[0], fetches=3.5)
    run.tried(*proposed(RULE, run.build()), kept=0.5)
    where = only_finding(RULE, run.build()).where
    assert where is not None
    assert where.line == 16
