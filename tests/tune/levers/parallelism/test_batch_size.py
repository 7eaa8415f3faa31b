from __future__ import annotations

import pytest
import torch
from tests.evidence_builder import EvidenceBuilder
from tests.lever_tools import found, pulled
from torch.utils.data import DataLoader, TensorDataset

from flatout.core.errors import EditError
from flatout.core.records.lever import Candidate, Refusal
from flatout.tune.levers.parallelism.batch_size import LEVER, edit


def test_multiples_are_offered_where_operators_are_small_and_quality_is_at_stake() -> None:
    run = EvidenceBuilder()
    run.loader()
    said = list(LEVER.propose(run.build(), [found(0.02)]))
    assert [c.parameters for c in said if isinstance(c, Candidate)] == [
        {"was": 32, "factor": 4},
        {"was": 32, "factor": 2},
    ]
    assert LEVER.guarantee == "quality"


def test_without_a_finding_or_a_batch_size_it_says_why() -> None:
    [enough] = LEVER.propose(EvidenceBuilder().build(), [])
    [nowhere] = LEVER.propose(EvidenceBuilder().build(), [found(0.02)])
    assert isinstance(enough, Refusal)
    assert isinstance(nowhere, Refusal)
    assert "DataLoader" in nowhere.because


def test_loaders_of_that_size_are_made_with_larger_batches() -> None:
    data = TensorDataset(torch.arange(100))
    with pulled(LEVER, factor=4, was=8) as hooks:
        assert DataLoader(data, 8).batch_size == 32
        assert DataLoader(data, 10).batch_size == 10
        assert hooks.done == [LEVER.id]
    assert DataLoader(data, 8).batch_size == 8


IMPORT = "from torch.utils.data import DataLoader\n"


@pytest.mark.parametrize(
    ("text", "changed"),
    [
        (f"{IMPORT}loader = DataLoader(data, batch_size=8)\n", "batch_size=16"),
        (f"{IMPORT}loader = DataLoader(data, 8, shuffle=True)\n", "(data, 16, shuffle=True)"),
        (f"{IMPORT}B = 8\nloader = DataLoader(data, batch_size=B)\nother = DataLoader(test, B)\n", "B = 16"),
        (
            f"{IMPORT}p.add_argument('--batch-size', type=int, default=8)\na = DataLoader(d, args.batch_size)\n",
            "default=16",
        ),
        ("BATCH_SIZE = 8\nindex = torch.randint(len(x), (BATCH_SIZE,))\n", "BATCH_SIZE = 16"),
        ("parser.add_argument('--batch', type=int, default=8)\n", "default=16"),
    ],
)
def test_the_number_is_edited_where_it_stands(text: str, changed: str) -> None:
    assert changed in edit(text, {"factor": 2})
    assert edit(text, {"factor": 1}) == text


@pytest.mark.parametrize(
    "text",
    [
        "steps = 8\n",
        "batch_size = 8\nBATCH = 4\n",
        f"{IMPORT}a = DataLoader(data, 8)\nb = DataLoader(data, 16)\n",
        f"{IMPORT}a = DataLoader(data, size_of(data))\n",
    ],
)
def test_what_is_not_certain_is_left(text: str) -> None:
    with pytest.raises(EditError):
        edit(text, {"factor": 2})
