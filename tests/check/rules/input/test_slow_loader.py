from __future__ import annotations

import msgspec
import pytest
from tests.evidence_builder import EvidenceBuilder, only_finding, proposed

from flatout.check.diagnosis import diagnose
from flatout.check.rules.input.slow_loader import RULE
from flatout.core.records.evidence import Evidence
from flatout.core.records.trial import TimeDataset, TrialResult
from flatout.core.records.workload import LibraryFrame


def waiting(
    *, wait_s: float = 0.06, noise_s: float = 0.001, num_workers: int = 0, is_map_style: bool = True
) -> EvidenceBuilder:
    """A loop over a loader on line 16 of train.py whose data set spends its time on line 9 of data.py."""
    run = EvidenceBuilder(noise_s=noise_s, data=wait_s)
    loop = run.line("train.py", 16, "for x, y in loader:")
    hot = run.line("data.py", 9, "return torch.tensor(tokenize(self.rows[i]))")
    run.loader(loop, num_workers=num_workers, wait_s=wait_s, is_map_style=is_map_style)
    run.sampled(hot, 0.8 * wait_s, num_samples=80, phase="data", process="worker" if num_workers else "main")
    run.sampled(loop, 0.2 * wait_s, num_samples=20, phase="data", process="worker" if num_workers else "main")
    return run


def test_the_data_set_is_tried_by_hand() -> None:
    assert proposed(RULE, waiting().build()) == [TimeDataset(loader=0)]


def test_a_stream_is_not_tried() -> None:
    assert not proposed(RULE, waiting(is_map_style=False).build())


def test_the_line_of_the_data_set_is_named() -> None:
    finding = only_finding(RULE, waiting(wait_s=0.06).build())
    assert finding.where is not None
    assert (finding.where.file, finding.where.line) == ("/home/ada/data.py", 9)
    assert (finding.cost_s, finding.phases, finding.basis) == (pytest.approx(0.06), ("data",), "estimate")


def test_without_samples_the_loop_over_the_loader_is_named() -> None:
    run = waiting()
    run.lines.clear()
    where = only_finding(RULE, run.build()).where
    assert where is not None
    assert where.line == 16


def test_where_a_library_loops_over_the_loader_the_line_that_made_it_is_named() -> None:
    run = EvidenceBuilder(data=0.06)
    fit, made = run.line("train.py", 16, "trainer.fit(model, loader)"), run.line("train.py", 9, "DataLoader(data)")
    run.loader(fit, wait_s=0.06, constructed=made)
    where = only_finding(RULE, run.build()).where
    assert where is not None
    assert where.line == 9


def test_repeatable_items_are_priced_by_the_trial() -> None:
    run = waiting(wait_s=0.06)
    run.tried(TimeDataset(loader=0), kept=0.1, now_s=0.06, repeatable=True)

    finding = only_finding(RULE, run.build())

    assert finding.basis == "trial"
    assert finding.saved_s[0] < finding.saved_s[1] == pytest.approx(0.9 * 0.06)


@pytest.mark.parametrize(
    ("num_items", "num_epochs", "exit", "is_prepared"),
    [
        (2000.0, 0.0, "finished", False),
        (1000.0, 0.0, "finished", True),
        (2000.0, 0.1, "finished", True),
        (2000.0, 0.0, "stopped", True),
    ],
    ids=["each item once", "items come again", "a second pass", "not known to have ended"],
)
def test_preparing_once_gains_nothing_where_the_script_asks_once(
    num_items: float, num_epochs: float, exit: str, is_prepared: bool
) -> None:
    run = waiting()
    run.loaders[0] = msgspec.structs.replace(run.loaders[0], num_epochs=num_epochs)  # 60 batches of 32
    facts, parts = {"repeatable": True}, {"num_items": num_items}
    run.trial(TrialResult(trial=TimeDataset(loader=0), now_s=0.06, cured_s=0.006, facts=facts, parts=parts))

    finding = only_finding(RULE, msgspec.structs.replace(run.build(), exit=exit))

    assert ("prepare them once" in finding.edit) == is_prepared
    assert finding.basis == ("trial" if is_prepared else "estimate")


def test_items_of_which_nobody_knows_whether_they_repeat_are_an_estimate() -> None:
    run = waiting()
    run.trial(TrialResult(trial=TimeDataset(loader=0), now_s=0.06, cured_s=0.006))
    finding = only_finding(RULE, run.build())
    assert finding.basis == "estimate"
    assert "prepare them once" not in finding.edit


def test_random_items_without_a_line_are_not_priced_by_the_trial() -> None:
    run = waiting()
    run.lines.clear()
    run.tried(TimeDataset(loader=0), kept=0.1, now_s=0.06, repeatable=False)
    finding = only_finding(RULE, run.build())
    assert finding.basis == "estimate"
    assert "prepare them once" not in finding.edit


@pytest.mark.parametrize("facts", [{"repeatable": False}, {"repeatable": True, "views": True}])
def test_random_items_and_rows_in_memory_are_left_to_their_own_rules(facts: dict[str, bool]) -> None:
    run = waiting()
    run.tried(TimeDataset(loader=0), kept=0.1, now_s=0.06, **facts)
    assert not list(RULE.check(run.build()))


def test_a_function_of_many_lines_is_one_place() -> None:
    run = waiting(wait_s=0.06)
    for line, seconds in ((21, 0.03), (22, 0.025)):
        run.sampled(run.line("data.py", line, function="tokens"), seconds, phase="data")
    where = only_finding(RULE, run.build()).where
    assert where is not None
    assert where.line == 21


def test_the_wait_for_workers_is_named_on_the_workers_line() -> None:
    finding = only_finding(RULE, waiting(num_workers=4).build())
    assert finding.where is not None
    assert finding.where.line == 9
    assert "num_workers=" not in finding.edit, "there are workers already"


def test_a_short_wait_is_left_alone() -> None:
    run = waiting(wait_s=0.003)
    assert not proposed(RULE, run.build())
    assert not list(RULE.check(run.build()))


def test_a_wait_below_the_noise_is_not_reported() -> None:
    run = waiting(wait_s=0.02, noise_s=0.03)
    assert diagnose(run.build(), [RULE]).findings == ()


def test_data_without_a_loader_are_left_alone() -> None:
    run = EvidenceBuilder(data=0.06)
    assert not proposed(RULE, run.build())
    assert not list(RULE.check(run.build()))


def test_the_edit_does_not_begin_in_the_middle_of_a_sentence() -> None:
    assert not only_finding(RULE, waiting().build()).edit.startswith("or ")


MNIST = LibraryFrame(
    file="torchvision/datasets/mnist.py", line=146, function="MNIST.__getitem__", text="self.transform(img)"
)


def below(*functions: str) -> tuple[LibraryFrame, ...]:
    return (
        MNIST,
        *(
            LibraryFrame(file="torchvision/functional.py", line=sum(map(ord, f)), function=f, text="t")
            for f in functions
        ),
    )


def through_library(seconds: dict[str, float]) -> EvidenceBuilder:
    """A loop over a loader whose items spend this long in each of torchvision's functions."""
    run = EvidenceBuilder(data=0.06)
    run.loader(run.line("train.py", 16, "for x, y in loader:"), wait_s=0.06)
    for name, function_s in seconds.items():
        line = run.line("train.py", 16, "for x, y in loader:", via=below(name))
        run.sampled(line, function_s, num_samples=round(1e3 * function_s), phase="data")
    return run


def test_the_innermost_library_function_with_most_of_the_time_is_shown_with_its_own_share() -> None:
    finding = only_finding(RULE, through_library({"to_tensor": 0.024, "normalize": 0.02, "resize": 0.016}).build())
    assert finding.where is not None
    assert finding.where.via == (MNIST,)
    assert "100% of the time in the data pipeline is in MNIST.__getitem__" in finding.because

    finding = only_finding(RULE, through_library({"to_tensor": 0.04, "normalize": 0.02}).build())
    assert finding.where is not None
    assert [frame.function for frame in finding.where.via] == ["MNIST.__getitem__", "to_tensor"]
    assert "67% of the time in the data pipeline is in to_tensor" in finding.because


def test_the_hottest_line_of_it_counts_all_that_it_leads_to() -> None:
    def line_of_to_tensor(line: int, *deeper: str) -> tuple[LibraryFrame, ...]:
        frame = LibraryFrame(file="torchvision/functional.py", line=line, function="to_tensor", text="t")
        rest = (LibraryFrame(file=f"PIL/{f}.py", line=3, function=f, text="t") for f in deeper)
        return (MNIST, frame, *rest)

    run = EvidenceBuilder(data=0.06)
    run.loader(run.line("train.py", 16, "for x, y in loader:"), wait_s=0.06)
    for via in (line_of_to_tensor(168, "open"), line_of_to_tensor(168, "read"), line_of_to_tensor(168, "close")):
        run.sampled(run.line("train.py", 16, "for x, y in loader:", via=via), 0.012, num_samples=12, phase="data")
    run.sampled(
        run.line("train.py", 16, "for x, y in loader:", via=line_of_to_tensor(176)), 0.02, num_samples=20, phase="data"
    )

    finding = only_finding(RULE, run.build())

    assert finding.where is not None
    assert finding.where.via[-1].line == 168


def test_a_library_function_with_little_of_the_time_does_not_stand_for_the_users_own() -> None:
    run = waiting(wait_s=0.06)
    run.sampled(run.line("data.py", 9, via=below("to_tensor")), 0.01, num_samples=10, phase="data")
    where = only_finding(RULE, run.build()).where
    assert where is not None
    assert (where.line, where.via) == (9, ())


def on_one_core(run: EvidenceBuilder) -> Evidence:
    evidence = run.build()
    return msgspec.structs.replace(evidence, workload=msgspec.structs.replace(evidence.workload, num_cores=1))


def test_a_worker_is_not_advised_where_the_model_computes_on_the_only_core() -> None:
    evidence = on_one_core(waiting(wait_s=0.06))
    diagnosis = diagnose(evidence, [RULE])
    assert not diagnosis.findings
    assert "another core" in diagnosis.notes[0].text

    run = waiting(wait_s=0.06)
    run.tried(TimeDataset(loader=0), kept=0.1, now_s=0.06, repeatable=True)
    finding = only_finding(RULE, on_one_core(run))
    assert "prepare them once" in finding.edit
    assert "num_workers" not in finding.edit


def test_items_that_are_asked_for_once_can_only_be_cheaper() -> None:
    run = waiting(wait_s=0.06)
    run.loaders[0] = msgspec.structs.replace(run.loaders[0], num_epochs=0.0)
    parts = {"num_items": 2000.0}
    trial = TrialResult(trial=TimeDataset(loader=0), now_s=0.06, cured_s=0.006, facts={"repeatable": True}, parts=parts)
    run.trial(trial)

    finding = only_finding(RULE, msgspec.structs.replace(run.build(), exit="finished"))

    assert finding.edit.startswith("make a batch with whole-array operations")
    assert finding.saved_s == pytest.approx((0.85 * 0.054, 0.98 * 0.054)), "the user's own Python, nearly all of it"
