"""What the page on attention shows is what comes out."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

import pytest
import torch

PAGE = Path(__file__).parents[4] / "docs" / "how-to" / "attend-with-structure.md"


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="the page shows what a machine without a GPU prints")
def test_the_example_prints_what_the_page_says() -> None:
    text = PAGE.read_text(encoding="utf-8")
    code, shown = text.split("```python\n")[1].split("```")[0], text.split("```text\n")[1].split("```")[0]
    printed = io.StringIO()

    with contextlib.redirect_stdout(printed):
        exec(compile(code, str(PAGE), "exec"), {})

    assert printed.getvalue() == shown


def test_every_structure_that_there_is_stands_in_the_table() -> None:
    from flatout import masks

    text = PAGE.read_text(encoding="utf-8")
    made = [name for name, value in vars(masks).items() if callable(value) and value.__module__ == masks.__name__]

    assert [name for name in made if not name.startswith("_") and f"{name}(" not in text] == ["everything"]
