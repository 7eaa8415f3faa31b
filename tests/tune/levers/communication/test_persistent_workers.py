from __future__ import annotations

import pytest
import torch
from tests.evidence_builder import EvidenceBuilder
from tests.lever_tools import edited, pulled, ran
from torch.utils.data import DataLoader, TensorDataset

from flatout.core.errors import EditError
from flatout.core.records.lever import Refusal
from flatout.tune.levers.communication.persistent_workers import LEVER


def test_a_run_without_workers_is_refused() -> None:
    [refusal] = LEVER.propose(EvidenceBuilder().build(), [])
    assert isinstance(refusal, Refusal)


def test_loaders_with_workers_are_made_with_lasting_ones() -> None:
    data = TensorDataset(torch.arange(8))
    with pulled(LEVER) as hooks:
        assert not DataLoader(data, 2).persistent_workers
        assert not hooks.done
        assert DataLoader(data, 2, num_workers=1).persistent_workers
        assert hooks.done == [LEVER.id]
    assert not DataLoader(data, 2, num_workers=1).persistent_workers


LOAD = """
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    workers = 1
    data = TensorDataset(torch.arange(8))
    first = DataLoader(data, 2, num_workers=workers)
    second = DataLoader(data, 2)
    third = DataLoader(data, batch_size=2, num_workers=2)
"""


@pytest.mark.parametrize("workers", ["1", "0"])
def test_edited_the_loaders_with_workers_keep_them(workers: str) -> None:
    after = ran(edited(LEVER, LOAD.replace("workers = 1", f"workers = {workers}")))
    assert [after[n].persistent_workers for n in ("first", "second", "third")] == [workers == "1", False, True]


@pytest.mark.parametrize(
    "call", ["DataLoader(data, 2)", "DataLoader(data, num_workers=min(2, n))", "DataLoader(data, **o)"]
)
def test_a_loader_whose_workers_are_not_known_is_not_edited(call: str) -> None:
    with pytest.raises(EditError):
        edited(LEVER, f"from torch.utils.data import DataLoader\nloader = {call}\n")


@pytest.mark.slow
def test_shuffles_of_later_epochs_are_those_of_workers_that_start_anew() -> None:
    def epochs() -> list[list[int]]:
        torch.manual_seed(0)
        loader = DataLoader(list(range(12)), batch_size=3, shuffle=True, num_workers=1)
        return [[int(x) for batch in loader for x in batch] for _ in range(3)]

    expected = epochs()
    with pulled(LEVER) as hooks:
        assert epochs() == expected
        assert hooks.done == [LEVER.id]
