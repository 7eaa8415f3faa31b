"""communication.tensors-once: tensors of records that stay the same are made once."""

from __future__ import annotations

from pathlib import Path
from textwrap import indent
from typing import Any

import msgspec
import pytest
import torch
from tests.evidence_builder import EvidenceBuilder
from tests.lever_tools import found

from flatout.core.errors import EditError
from flatout.core.records.lever import Candidate, Refusal
from flatout.core.records.workload import Source
from flatout.tune.levers.communication.tensors_once import LEVER, edit

HEAD = """import random

import numpy as np
import torch

FIELDS = ["a", "b"]


def f():
    torch.manual_seed(0)
    random.seed(0)
    rng = np.random.default_rng(0)
    records = [{"a": i * 0.25, "b": i * i, "images": i, "left": i % 2} for i in range(20)]
    pairs = [(float(i), i % 3) for i in range(20)]
    images = [torch.full((2, 2), float(i)) for i in range(20)]
    sums = []
"""
TAIL = """
    return sums
"""

CASES = {
    "records by random rows": (
        "x = torch.tensor([[record[field] for field in FIELDS] for record in chosen])",
        """
for step in range(5):
    chosen = [records[i] for i in torch.randint(len(records), (4,)).tolist()]
    x = torch.tensor([[record[field] for field in FIELDS] for record in chosen])
    left = torch.tensor([record["left"] for record in chosen], dtype=torch.float32)
    sums.append((x, left / len(chosen)))
""",
    ),
    "rows of a name": (
        "x = torch.tensor([pairs[i][0] for i in idx])",
        """
for step in range(5):
    idx = random.sample(range(len(pairs)), 4)
    x = torch.tensor([pairs[i][0] for i in idx])
    y = torch.tensor([pairs[i][1] for i in idx])
    sums.append((x, y))
""",
    ),
    "slices of an order made anew each epoch": (
        "x = np.array([pair[0] for pair in batch], dtype=np.float32)",
        """
for epoch in range(2):
    random.shuffle(pairs)
    for start in range(0, len(pairs), 8):
        batch = pairs[start : start + 8]
        x = np.array([pair[0] for pair in batch], dtype=np.float32)
        sums.append((torch.from_numpy(x), torch.tensor([pair[1] for pair in batch])))
""",
    ),
    "tensors stacked": (
        "x = torch.stack([images[i] for i in rows])",
        """
order = torch.randperm(20)
for step in range(5):
    rows = order[4 * step : 4 * step + 4]
    x = torch.stack([images[i] for i in rows])
    sums.append((x,))
""",
    ),
    "sampled at random": (
        "x = torch.tensor([[r[f] for f in FIELDS] for r in batch], dtype=torch.float32)",
        """
for step in range(5):
    batch = random.sample(records, 4)
    x = torch.tensor([[r[f] for f in FIELDS] for r in batch], dtype=torch.float32)
    sums.append((x, torch.tensor(random.random())))
""",
    ),
    "in the middle of an expression": (
        "sums.append((torch.tensor([p[0] for p in pairs[step : step + 3]]).double(),))",
        """
for step in range(5):
    sums.append((torch.tensor([p[0] for p in pairs[step : step + 3]]).double(),))
""",
    ),
    "indices from NumPy": (
        "x = torch.tensor(np.array([pairs[i] for i in rows]))",
        """
for step in range(5):
    rows = rng.choice(20, 4, replace=False)
    x = torch.tensor(np.array([pairs[i] for i in rows]))
    sums.append((x,))
""",
    ),
}


def text_of(body: str) -> str:
    return HEAD + indent(body.strip("\n"), "    ") + TAIL


def edited(body: str, code: str) -> str:
    return edit(text_of(body), {"file": "a.py", "function": "f", "code": code})


def batches_of(text: str) -> list[tuple[torch.Tensor, ...]]:
    names: dict[str, Any] = {}
    exec(text, names)
    result: list[tuple[torch.Tensor, ...]] = names["f"]()
    return result


@pytest.mark.slow
@pytest.mark.parametrize(("code", "body"), CASES.values(), ids=list(CASES))
def test_the_batches_are_the_same(code: str, body: str) -> None:
    new = edited(body, code)
    assert code not in new
    before, after = batches_of(text_of(body)), batches_of(new)
    assert len(before) == len(after) > 1
    for one, two in zip(before, after, strict=True):
        for a, b in zip(one, two, strict=True):
            assert a.dtype == b.dtype and torch.equal(a, b)


def test_it_reads_as_a_person_would_write_it() -> None:
    code, body = CASES["records by random rows"]
    assert edited(body, code) == text_of(
        """
all_x = torch.tensor([[record[field] for field in FIELDS] for record in records])
all_left = torch.tensor([record["left"] for record in records], dtype=torch.float32)
for step in range(5):
    rows = torch.randint(len(records), (4,))
    x = all_x[rows]
    left = all_left[rows]
    sums.append((x, left / len(rows)))
"""
    )


REFUSED = {
    "no loop": (
        "x = torch.tensor([p[0] for p in pairs[:3]])",
        "x = torch.tensor([p[0] for p in pairs[:3]])",
        "in no loop",
    ),
    "records that grow": (
        "x = torch.tensor([p[0] for p in pairs[s : s + 3]])",
        "for s in range(3):\n    x = torch.tensor([p[0] for p in pairs[s : s + 3]])\n    pairs.append((1.0, 2))",
        "handed on",
    ),
    "records handed on": (
        "x = torch.tensor([p[0] for p in pairs[s : s + 3]])",
        "for s in range(3):\n    x = torch.tensor([p[0] for p in pairs[s : s + 3]])\n    random.shuffle(pairs)",
        "handed on",
    ),
    "a row written": (
        "x = torch.tensor([p[0] for p in pairs[s : s + 3]])",
        "for s in range(3):\n    x = torch.tensor([p[0] for p in pairs[s : s + 3]])\n    pairs[s] = (1.0, 2)",
        "changed in the loop",
    ),
    "random rows": (
        "x = torch.tensor([p[0] + random.random() for p in pairs[s : s + 3]])",
        "for s in range(3):\n    x = torch.tensor([p[0] + random.random() for p in pairs[s : s + 3]])",
        "may be random",
    ),
    "a batch used in another way": (
        "x = torch.tensor([r['a'] for r in batch])",
        "for s in range(3):\n    batch = records[s : s + 3]\n    x = torch.tensor([r['a'] for r in batch])\n    print(batch)",
        "used in another way",
    ),
    "windows": (
        "x = torch.stack([data[i : i + 4] for i in rows])",
        "for s in range(3):\n    rows = [1, 2]\n    x = torch.stack([data[i : i + 4] for i in rows])",
        "used in another way",
    ),
    "a row that depends on the step": (
        "x = torch.tensor([p[0] * s for p in pairs[s : s + 3]])",
        "for s in range(3):\n    x = torch.tensor([p[0] * s for p in pairs[s : s + 3]])",
        "'s' is changed",
    ),
    "a view that is changed": (
        "x = torch.tensor([p[0] for p in pairs[s : s + 3]])",
        "for s in range(3):\n    x = torch.tensor([p[0] for p in pairs[s : s + 3]])\n    x += 1",
        "changed in place",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(("code", "body", "why"), REFUSED.values(), ids=list(REFUSED))
def test_it_refuses_what_is_not_certain(code: str, body: str, why: str) -> None:
    with pytest.raises(EditError, match=why):
        edited(body, code)


def test_it_offers_itself_where_the_rule_found_it(tmp_path: Path) -> None:
    code, body = CASES["records by random rows"]
    script = tmp_path / "train.py"
    script.write_text(text_of(body), encoding="utf-8")
    number = next(i for i, line in enumerate(text_of(body).splitlines(), start=1) if line.strip() == code)
    evidence = EvidenceBuilder().build()
    workload = msgspec.structs.replace(evidence.workload, command=("python", "train.py"), cwd=str(tmp_path))
    evidence = msgspec.structs.replace(evidence, workload=workload)
    finding = msgspec.structs.replace(found(0.01), where=Source(file=str(script), line=number, function="f"))

    [said] = LEVER.propose(evidence, [finding])
    assert isinstance(said, Candidate) and said.parameters["code"] == code
    [refused] = LEVER.propose(evidence, [])
    assert isinstance(refused, Refusal) and LEVER.edit is edit
