from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.evidence_builder import EvidenceBuilder

from flatout.machine.cost.trace import consumers, longest_dependence, walk_back, walk_forward

N = 30


def depth(run: EvidenceBuilder, *rows: int) -> int:
    evidence = run.build()
    return longest_dependence(evidence.trace, evidence.operators, set(rows))


def loop(run: EvidenceBuilder, *ops: str) -> list[int]:
    """One row for each operator, on line 12."""
    return [run.operator(op, run.line("model.py", 12), calls=N) for op in ops]


# -------------------------------------------------------------------------------------------------- longest_dependence


def test_a_recurrence_is_as_long_as_its_iterations() -> None:
    run = EvidenceBuilder()
    select, mm, tanh = loop(run, "aten.select", "aten.mm", "aten.tanh")
    state = -1
    for _ in range(N):
        state = run.call(tanh, run.call(mm, run.call(select, -1), state))
    assert depth(run, select, mm, tanh) == N


def test_independent_rows_depend_on_nothing() -> None:
    run = EvidenceBuilder()
    select, mm, tanh = loop(run, "aten.select", "aten.mm", "aten.tanh")
    for _ in range(N):
        run.call(tanh, run.call(mm, run.call(select, -1), -1))
    assert depth(run, select, mm, tanh) == 1


def test_rows_written_into_one_buffer_are_independent() -> None:
    run = EvidenceBuilder()
    select, tanh, copy = loop(run, "aten.select", "aten.tanh", "aten.copy_")
    buffer = -1
    for _ in range(N):
        row = run.call(tanh, -1)
        buffer = run.call(copy, run.call(select, buffer), row)
    assert depth(run, select, tanh, copy) == 1


@pytest.mark.parametrize("write", ["aten.copy_", "aten.index_put_", "aten.fill_"])
def test_a_row_read_back_from_the_buffer_is_a_dependence(write: str) -> None:
    run = EvidenceBuilder()
    select, tanh, copy = loop(run, "aten.select", "aten.tanh", write)
    buffer = -1
    for _ in range(N):
        row = run.call(tanh, run.call(select, buffer))
        buffer = run.call(copy, -1, row)
    assert depth(run, select, tanh, copy) == N


@pytest.mark.parametrize(("is_same_part", "expected"), [(False, 1), (True, N)])
@pytest.mark.parametrize("write", ["aten.index_add_", "aten.scatter_add_", "aten.mul_"])
def test_writers_into_parts_of_a_buffer_need_the_last_writer_of_their_part(
    write: str, is_same_part: bool, expected: int
) -> None:
    run = EvidenceBuilder()
    line = run.line("model.py", 12)
    buffer = run.call(run.operator("aten.zeros", line, output=(N, 64)))
    writer = run.operator(write, line, inputs=[(64,)], output=(64,), calls=N)
    rows = [writer]
    for i in range(N):
        scalars = f"0, {0 if is_same_part else i}"
        rows.append(run.operator("aten.select", line, inputs=[(N, 64)], output=(64,), scalars=scalars))
        run.call(rows[-1], buffer)
        buffer = run.call(writer, buffer)
    assert depth(run, *rows) == expected


def test_a_writer_into_a_whole_buffer_needs_what_was_in_it() -> None:
    run = EvidenceBuilder()
    [writer] = loop(run, "aten.mul_")
    buffer = -1
    for _ in range(N):
        buffer = run.call(writer, buffer)
    assert depth(run, writer) == N


@pytest.mark.parametrize("gather", ["aten.add", "aten.add_", "aten.cat", "aten.maximum"])
def test_rows_that_are_gathered_one_by_one_are_independent(gather: str) -> None:
    run = EvidenceBuilder()
    tanh, add = loop(run, "aten.tanh", gather)
    total = -1
    for _ in range(N):
        total = run.call(add, total, run.call(tanh, -1))
    assert depth(run, tanh, add) == 1


def test_rows_stacked_at_the_end_are_independent() -> None:
    run = EvidenceBuilder()
    tanh, stack = loop(run, "aten.tanh", "aten.stack")
    run.call(stack, *[run.call(tanh, -1) for _ in range(N)])
    assert depth(run, tanh, stack) == 1


def test_a_state_that_changes_its_shape_is_still_one_chain() -> None:
    run = EvidenceBuilder()
    line = run.line("model.py", 12)
    rows = [run.operator("aten.softmax", line, output=(8, n)) for n in range(1, N + 1)]
    state = -1
    for row in rows:
        state = run.call(row, state)
    assert depth(run, *rows) == N


def test_a_step_without_such_calls_has_no_chain() -> None:
    run = EvidenceBuilder()
    [tanh] = loop(run, "aten.tanh")
    assert depth(run, tanh) == 0
    run.call(tanh, -1)
    assert depth(run) == 0


def test_a_chain_may_pass_other_operators() -> None:
    run = EvidenceBuilder()
    tanh, other = loop(run, "aten.tanh", "aten.mm")
    state = -1
    for _ in range(N):
        state = run.call(other, run.call(tanh, state))
    assert depth(run, tanh) == N


@given(st.lists(st.integers(-1, 30), min_size=1, max_size=30))
def test_a_chain_is_never_longer_than_the_calls(made_of: list[int]) -> None:
    run = EvidenceBuilder()
    [tanh] = loop(run, "aten.tanh")
    for call, producer in enumerate(made_of):
        run.call(tanh, min(producer, call - 1))
    assert 1 <= depth(run, tanh) <= len(made_of)


# ------------------------------------------------------------------------------------------ consumers and the two walks

THROUGH = frozenset({"aten.view", "aten.mul"})


def attention() -> tuple[EvidenceBuilder, dict[str, int]]:
    """first -> product -> view -> mul (by a mask) -> softmax -> view -> values -> last; call by name."""
    run = EvidenceBuilder()
    line = run.line("model.py", 12)
    view, mul = run.operator("aten.view", line), run.operator("aten.mul", line)
    mm, softmax = run.operator("aten.mm", line), run.operator("aten._softmax", line)
    calls = {"first": run.call(mm, -1, -1), "mask": run.call(mm, -1)}
    calls["product"] = run.call(mm, calls["first"], -1)
    calls["view"] = run.call(view, calls["product"])
    calls["mul"] = run.call(mul, calls["view"], calls["mask"])
    calls["softmax"] = run.call(softmax, calls["mul"])
    calls["flat"] = run.call(view, calls["softmax"])
    calls["values"] = run.call(mm, calls["flat"], -1)
    calls["last"] = run.call(mm, calls["values"], -1)
    return run, calls


def back(run: EvidenceBuilder, start: int, limit: int = 24) -> list[int]:
    evidence = run.build()
    return list(walk_back(evidence.trace, evidence.operators, start, THROUGH, limit))


def forward(run: EvidenceBuilder, start: int) -> list[int]:
    evidence = run.build()
    return list(walk_forward(consumers(evidence.trace), evidence.trace, evidence.operators, start, THROUGH))


def test_readers_are_the_calls_that_take_what_a_call_made() -> None:
    run, calls = attention()
    readers = consumers(run.build().trace)
    assert readers[calls["softmax"]] == [calls["flat"]]
    assert calls["last"] not in readers
    assert -1 not in readers, "tensors made before the step have no call"


def test_walking_back_ends_at_the_first_other_operators() -> None:
    run, calls = attention()
    assert back(run, calls["softmax"]) == [calls[name] for name in ("mul", "view", "mask", "product")]


def test_walking_forward_ends_at_the_first_other_operator() -> None:
    run, calls = attention()
    assert forward(run, calls["softmax"]) == [calls[name] for name in ("flat", "values")]


def test_walking_visits_each_call_once() -> None:
    run = EvidenceBuilder()
    view, mul = run.operator("aten.view"), run.operator("aten.mul")
    first = run.call(view, -1)
    squared = run.call(mul, first, first)
    last = run.call(mul, squared, first)
    assert back(run, last) == [squared, first]
    assert forward(run, first) == [squared, last]


def test_walking_back_gives_up_at_the_limit() -> None:
    run = EvidenceBuilder()
    view = run.operator("aten.view")
    call = -1
    for _ in range(100):
        call = run.call(view, call)
    assert len(back(run, call, limit=5)) == 5


def test_walking_from_a_call_made_of_nothing_goes_nowhere() -> None:
    run, calls = attention()
    assert back(run, calls["first"]) == []
    assert forward(run, calls["last"]) == []
