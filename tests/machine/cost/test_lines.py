from __future__ import annotations

from tests.evidence_builder import EvidenceBuilder

from flatout.core.records.workload import LibraryFrame
from flatout.machine.cost.lines import covering_line, function_finder, line_finder

TRAINER = LibraryFrame(file="transformers/trainer.py", line=2300, function="Trainer.train")


def frame(line: int, function: str = "Attention.forward") -> LibraryFrame:
    return LibraryFrame(file="transformers/models/bert.py", line=line, function=function)


def trained_by_a_library(*, own_s: float) -> tuple[EvidenceBuilder, tuple[int, int, int]]:
    """Two lines of a library of 20 ms each below `trainer.train()`, and one of the user's own."""
    run = EvidenceBuilder()
    one, two = (run.line("train.py", 12, "trainer.train()", via=(TRAINER, frame(line))) for line in (312, 340))
    own = run.line("model.py", 5, "y = x.exp()", function="forward")
    for source, op_s in ((one, 0.02), (two, 0.02), (own, own_s)):
        run.operator("aten.mm", source, op_s=op_s)
    return run, (one, two, own)


def test_below_a_line_that_runs_the_step_each_line_of_a_library_is_one() -> None:
    run, (one, two, own) = trained_by_a_library(own_s=0.01)
    line_of = line_finder(run.build())

    assert covering_line(run.build()) == ("/home/ada/train.py", 12, "")
    assert line_of(one) != line_of(two)
    assert line_of(own) == ("/home/ada/model.py", 5, "")
    assert line_of(-1) is None


def test_a_helper_of_a_library_does_not_split_the_line_that_calls_it() -> None:
    run, (one, two, _) = trained_by_a_library(own_s=0.06)
    line_of = line_finder(run.build())

    assert covering_line(run.build()) is None
    assert line_of(one) == line_of(two) == ("/home/ada/train.py", 12, "")


def test_the_function_is_the_librarys_where_it_runs_the_step() -> None:
    run, (one, _, own) = trained_by_a_library(own_s=0.01)
    function_of = function_finder(run.build())

    assert function_of(one) == ("transformers/models/bert.py", "Attention.forward")
    assert function_of(own) == ("/home/ada/model.py", "forward")
