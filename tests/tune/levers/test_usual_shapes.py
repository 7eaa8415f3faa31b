"""Rare shapes are not compiled for."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flatout.tune.levers.usual_shapes import UsualShapes


class Calls:
    """Counts what went to the compiled call."""

    def __init__(self, evaluated: nn.Module | None = None, *, is_ragged: bool = False) -> None:
        self.compiled: list[int] = []
        self.call = UsualShapes(self._compiled, lambda x, **_: x + 1, evaluated=evaluated, is_ragged=is_ragged)

    def _compiled(self, x: Tensor, **_: object) -> Tensor:
        self.compiled.append(len(x))
        return x + 1

    def run(self, sizes: list[int]) -> list[int]:
        """The sizes that were compiled."""
        self.compiled.clear()
        for size in sizes:
            assert torch.equal(self.call(torch.zeros(size)), torch.ones(size))
        return self.compiled


def test_an_epochs_smaller_last_batch_is_not_compiled_for() -> None:
    epoch = [32] * 60 + [16]
    assert Calls().run(20 * epoch) == [32] * (60 * 20)


def test_shapes_of_the_first_calls_are() -> None:
    calls = Calls()
    assert calls.run([8, 8, 4]) == [8, 8, 4]
    assert calls.run([4] * 30) == [4] * 30


def test_shapes_that_come_to_stay_are() -> None:
    calls = Calls()
    calls.run([32] * 100)
    assert calls.run([64] * 40) == [64] * 21


def test_ragged_batches_all_go_to_one_dynamic_graph() -> None:
    sizes = [3, 5, 9, *range(10, 60)]
    assert Calls().run(sizes) == sizes


def test_batches_that_vary_later_are_compiled_as_well() -> None:
    calls = Calls()
    calls.run([32] * 100)
    assert len(calls.run([*range(100, 200)])) == 100 - 32


def test_evaluation_is_counted_by_itself() -> None:
    calls = Calls()
    calls.run([32] * 100)
    with torch.no_grad():
        assert calls.run([1000] * 3) == [1000] * 3


def test_evaluations_of_a_model_in_training_are_plain_until_they_are_many() -> None:
    """Samples of growing length between steps would be a graph each, and then a dynamic one."""
    calls = Calls(nn.Linear(2, 2))
    calls.run([32] * 10)
    with torch.no_grad():
        assert calls.run([1, 2, 3, 4, 5, 6]) == []
        assert calls.run([1000] * 320) == [1000] * 21
    assert calls.run([32] * 3) == [32] * 3


def test_evaluations_before_the_training_are_plain_and_what_is_called_without_gradients_alone_is_not() -> None:
    evaluated = nn.Linear(2, 2).eval()
    calls, teacher = Calls(evaluated), Calls(nn.Linear(2, 2))
    with torch.no_grad():
        assert calls.run([8] * 3) == []
        assert teacher.run([8] * 3) == [8] * 3


def test_where_shapes_vary_all_the_time_training_is_compiled_and_its_evaluation_is_not() -> None:
    calls, sizes = Calls(nn.Linear(2, 2), is_ragged=True), [*range(1, 60)]
    assert calls.run(sizes) == sizes
    with torch.no_grad():
        assert calls.run(sizes) == []


def test_tensors_inside_lists_and_keywords_count() -> None:
    seen = []
    call = UsualShapes(lambda *args, **kwargs: seen.append("compiled"), lambda *args, **kwargs: seen.append("plain"))
    for _ in range(20):
        call([torch.zeros(2)], mask=torch.zeros(3))
    call([torch.zeros(1)], mask=torch.zeros(3))
    call([torch.zeros(2)], mask=torch.zeros(1))
    assert seen == ["compiled"] * 20 + ["plain"] * 2
