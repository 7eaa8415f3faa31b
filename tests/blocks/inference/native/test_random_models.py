"""Models that nobody wrote, against eager. `python bench/native_random.py` tries as many as one likes."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tests.blocks.inference.native.compared import judged

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not shutil.which("cc"), reason="needs a C compiler")]
_FIRST, _EACH = 0, 10


@pytest.mark.parametrize("batch", [0, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.long
def test_random_models_are_refused_or_equal_to_eager(batch: int, tmp_path: Path) -> None:
    """Over carried events, from rubbish in the work memory; step_many and step_streams give the bits of step."""
    first = _FIRST + batch * _EACH
    found = judged(range(first, first + _EACH), tmp_path)
    assert [f"{v.model}\n{v.why}" for v in found if v.kind == "wrong"] == []
    refused = [v.why for v in found if v.kind == "refused"]
    assert all("operator aten." in why or "torch.export cannot" in why for why in refused)  # torch 2.11 exports less
    assert sum(v.kind == "equal" for v in found) >= _EACH - 2
