from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from flatout.blocks.kernels.matmul import dispatch, table


@pytest.fixture(autouse=True)
def _own_table(tmp_path: Path) -> Iterator[None]:
    """Tests neither read nor write the table of the machine."""
    before = table.folder()
    table.keep_in(tmp_path)
    dispatch.forget()
    yield
    table.keep_in(before)
    dispatch.forget()
