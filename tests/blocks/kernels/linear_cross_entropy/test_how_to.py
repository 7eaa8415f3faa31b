from __future__ import annotations

from pathlib import Path
from typing import Any

_PAGE = Path(__file__).parents[4] / "docs" / "how-to" / "fuse-losses-and-norms.md"


def test_the_example_of_the_page_runs_and_reaches_every_leaf() -> None:
    [text] = [part.partition("```")[0] for part in _PAGE.read_text().split("```python\n")[1:]]
    scope: dict[str, Any] = {}
    exec(compile(text, str(_PAGE), "exec"), scope)
    assert scope["loss"].isfinite()
    assert all(scope[name].grad.isfinite().all() for name in ("x", "weight", "head"))
