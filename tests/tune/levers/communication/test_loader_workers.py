from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.evidence_builder import EvidenceBuilder
from tests.lever_tools import pulled
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from flatout.core.errors import EditError
from flatout.core.records.lever import Candidate, Refusal
from flatout.core.records.trial import TimeDataset, TimeWorkers, TrialResult
from flatout.tune.levers.communication import loader_workers
from flatout.tune.levers.communication.loader_workers import LEVER, edit


class Waves(Dataset[Any]):
    """Items made from their own seeds."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.rand(4, generator=torch.Generator().manual_seed(index)), index


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(4))


def epochs(loader: Any, num: int = 3) -> list[Tensor]:
    torch.manual_seed(0)
    seen = [x for _ in range(num) for x, _ in loader]
    return [*seen, torch.rand(2)]


def waiting(*, repeatable: bool = True, **loader: Any) -> EvidenceBuilder:
    run = EvidenceBuilder(data=0.05, forward=0.02, backward=0.03)
    run.loader(run.line("train.py", 5), wait_s=0.05, **loader)
    run.trials.append(
        TrialResult(
            trial=TimeDataset(loader=0),
            now_s=0.05,
            cured_s=0.01,
            facts={"repeatable": repeatable, "item_by_item": True},
        )
    )
    return run


def test_workers_and_threads_are_offered_for_a_loader_that_is_waited_for() -> None:
    said = list(LEVER.propose(waiting().build(), ()))
    assert all(isinstance(c, Candidate) for c in said)
    numbers = [c.parameters.get("num_workers", c.parameters.get("threads")) for c in said if isinstance(c, Candidate)]
    assert numbers == [8, 4, 1]
    assert all(-0.05 <= c.saved_s[0] <= c.saved_s[1] <= 0.05 for c in said if isinstance(c, Candidate))


def test_the_number_that_a_trial_found_best_comes_first() -> None:
    run = waiting()
    run.trials.append(
        TrialResult(
            trial=TimeWorkers(loader=0, counts=(1, 2, 4)),
            now_s=0.05,
            cured_s=0.05,
            variant="2",
            parts={"1": 0.07, "2": 0.05, "4": 0.06},
        )
    )
    first = next(LEVER.propose(run.build(), ()))
    assert isinstance(first, Candidate)
    assert first.parameters["num_workers"] == 2


def test_items_with_random_numbers_are_made_by_one_worker_that_draws_the_same() -> None:
    [candidate] = LEVER.propose(waiting(repeatable=False).build(), ())
    assert isinstance(candidate, Candidate)
    assert candidate.parameters["same_draws"] == 1 and "num_workers" not in candidate.parameters
    assert 0 < candidate.saved_s[1] <= 0.05


class Noise(Waves):
    """Items that hold numbers of the global generator."""

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.rand(4), index


def test_one_worker_draws_the_same_in_all_epochs() -> None:
    expected = epochs(DataLoader(Noise(), 6, shuffle=True))
    with pulled(LEVER, same_draws=1) as hooks:
        found = epochs(DataLoader(Noise(), 6, shuffle=True))
        assert hooks.done == [LEVER.id]
    assert all(map(torch.equal, found, expected)) and len(found) == len(expected)


@pytest.mark.parametrize(
    ("run", "why"),
    [
        (EvidenceBuilder(), "no loader is waited for"),
        (waiting(repeatable=False, num_workers=2), "random"),
        (waiting(is_map_style=False), "iterable"),
        (waiting(is_in_ram=True), "in memory already"),
    ],
)
def test_where_workers_cannot_help_it_says_why(run: EvidenceBuilder, why: str) -> None:
    [refusal] = LEVER.propose(run.build(), ())
    assert isinstance(refusal, Refusal)
    assert why in refusal.because


@pytest.mark.slow
@pytest.mark.parametrize("parameters", [{"num_workers": 2}, {"threads": 2}, {"num_workers": 1, "prefetch_factor": 3}])
def test_batches_and_random_numbers_are_the_same_over_epochs(parameters: dict[str, int]) -> None:
    expected = epochs(DataLoader(Waves(), 6, shuffle=True))
    with pulled(LEVER, **parameters) as hooks:
        found = epochs(DataLoader(Waves(), 6, shuffle=True))
        assert hooks.done == [LEVER.id]
    assert len(found) == len(expected)
    assert all(map(torch.equal, found, expected))


@pytest.mark.slow
def test_other_data_sets_are_left_alone() -> None:
    with pulled(LEVER, num_workers=1, dataset="Images") as hooks:
        assert DataLoader(Waves(), 6).num_workers == 0
        assert not hooks.done
    with pulled(LEVER, threads=1), pulled(LEVER, num_workers=2):
        loader = DataLoader(Stream(), 2)
        assert loader.num_workers == 0
        assert len(list(loader)) == 2


IMPORT = "from torch.utils.data import DataLoader\n"


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ({"num_workers": 4}, "loader = DataLoader(data, 8, shuffle=True, num_workers=4, persistent_workers=True)\n"),
        ({"threads": 2}, "loader = Threads(DataLoader(data, 8, shuffle=True), 2)\n"),
        ({"same_draws": 1}, "loader = InWorker(DataLoader(data, 8, shuffle=True))\n"),
        (
            {"num_workers": 1, "prefetch_factor": 4},
            "loader = DataLoader(data, 8, shuffle=True, num_workers=1, persistent_workers=True, prefetch_factor=4)\n",
        ),
    ],
)
def test_the_call_is_edited(parameters: dict[str, Any], expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader_workers, "added_workers_start", lambda: None)
    changed = edit(f"{IMPORT}loader = DataLoader(data, 8, shuffle=True)\n", parameters)
    assert changed.endswith(expected)
    assert ("from flatout import Threads" in changed) == ("threads" in parameters)


@pytest.mark.parametrize(
    ("text", "is_forked"),
    [
        ("loader = DataLoader(data, 8)\n", True),
        ("loader = DataLoader(data, 8, num_workers=1)\n", False),
        ("loader = DataLoader(data, 8, multiprocessing_context='spawn')\n", False),
        ("torch.multiprocessing.set_start_method('spawn')\nloader = DataLoader(data, 8)\n", False),
    ],
)
def test_workers_where_there_were_none_are_forked_where_that_is_not_usual(
    text: str, is_forked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader_workers, "added_workers_start", lambda: "fork")
    assert ('multiprocessing_context="fork"' in edit(IMPORT + text, {"num_workers": 2})) == is_forked
    if "torch." not in text:
        names = {"DataLoader": DataLoader, "data": Waves()}
        with pulled(LEVER, num_workers=2):
            exec(text, names)
        context = names["loader"].multiprocessing_context  # type: ignore[attr-defined]
        is_own = "spawn" in text
        assert (context is not None and context.get_start_method()) == ("fork" if is_forked else is_own and "spawn")


def test_a_number_that_is_there_is_replaced_and_none_is_taken_out() -> None:
    text = f"{IMPORT}loader = DataLoader(data, num_workers=9, shuffle=True)\n"
    assert "(data, num_workers=2, shuffle=True, persistent" in edit(text, {"num_workers": 2})
    assert "DataLoader(data, shuffle=True)" in edit(text, {"num_workers": 0})


def test_workers_by_position_are_left() -> None:
    with pytest.raises(EditError, match="'num_workers' is passed by position"):
        edit(f"{IMPORT}loader = DataLoader(data, 8, True, None, None, 2)\n", {"num_workers": 4})


def fed(*, batch_s: float, num_workers: int = 4, on_device: bool = True) -> Candidate | Refusal:
    """Steps of 100 ms on a device that never wait for their four workers; one of them makes a batch in `batch_s`."""
    run = EvidenceBuilder(forward=0.05, backward=0.05, device_s=0.095 if on_device else None)
    run.loader(run.line("train.py", 5), wait_s=0.0, num_workers=num_workers)
    run.trials.append(TrialResult(trial=TimeDataset(loader=0), now_s=batch_s, cured_s=0.01, facts={"repeatable": True}))
    return next(iter(LEVER.propose(run.build(), ())))


def test_workers_that_hardly_keep_up_are_joined_by_more_beside_what_makes_steps_faster() -> None:
    offered = fed(batch_s=0.35)
    assert isinstance(offered, Candidate)
    assert offered.is_companion and offered.parameters["num_workers"] == 7  # of 8 cores


@pytest.mark.parametrize(
    ("on_device", "num_workers", "first"),
    [(True, 1, 4), (True, 2, 7), (False, 2, 8), (True, 7, 8)],  # of 8 cores, one is the step's own
)
def test_beside_a_device_workers_that_have_no_rest_are_joined_by_what_faster_steps_want(
    on_device: bool, num_workers: int, first: int
) -> None:
    run = EvidenceBuilder(data=0.01, forward=0.04, backward=0.05, device_s=0.085 if on_device else None)
    run.loader(run.line("train.py", 5), wait_s=0.01, num_workers=num_workers)
    offered = next(iter(LEVER.propose(run.build(), ())))
    assert isinstance(offered, Candidate)
    assert offered.parameters["num_workers"] == first


@pytest.mark.parametrize(
    "refused", [fed(batch_s=0.1), fed(batch_s=0.9, num_workers=8), fed(batch_s=0.35, on_device=False)]
)
def test_workers_that_keep_up_or_have_all_cores_stay(refused: Candidate | Refusal) -> None:
    assert isinstance(refused, Refusal) and "no loader is waited for" in refused.because
