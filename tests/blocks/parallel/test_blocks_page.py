"""The examples of the page on parallel blocks run, alone and over ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.blocks.parallel.forked import lines_of

pytestmark = pytest.mark.slow

PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "parallel-blocks.md"
EXAMPLES = [part.partition("```")[0] for part in PAGE.read_text().split("```python\n")[1:]]


@pytest.mark.parametrize("number", range(3))
def test_an_example_runs_alone(number: int, capsys: pytest.CaptureFixture[str]) -> None:
    text = EXAMPLES[number].replace("flatout.World()", 'flatout.World("cpu")')
    scope: dict[str, Any] = {}
    threads = torch.get_num_threads()
    exec(compile(text, str(PAGE), "exec"), scope)
    assert torch.get_num_threads() == threads
    assert all(p.isfinite().all() for p in scope["model"].parameters())
    if number == 2:
        assert capsys.readouterr().out == "at most 2 of 6 blocks on the device\n"


RANKS = """
    import json
    import flatout.blocks.parallel.layouts  # here, and not in each rank

    def work(text):
        scope = {}
        exec(compile(text, "page", "exec"), scope)
        report(f"{sum(p.numel() for p in scope['model'].parameters())}")

    for text in json.loads(sys.argv[1]):
        as_ranks(2, lambda: work(text))
"""


@pytest.mark.multi
@pytest.mark.long
def test_examples_run_over_two_ranks() -> None:
    texts = [text.replace("flatout.World()", 'flatout.World("cpu")') for text in EXAMPLES[:2]]
    said = lines_of(RANKS, json.dumps(texts))
    [sent] = [line for line in said if "bytes sent" in line]
    part, _, whole = sent.partition(" of ")
    assert int(part) < int(whole.split()[0]) / 2
    assert len(said) == 5
