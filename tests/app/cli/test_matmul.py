from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from flatout.app.cli.app import app
from flatout.blocks.kernels.matmul import dispatch, table
from flatout.core.errors import UsageError


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    before = table.folder()
    yield
    table.keep_in(before)
    dispatch.forget()


def _run(*words: str) -> str:
    result = CliRunner().invoke(app, ["matmul", *words], catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


@pytest.mark.slow
def test_shapes_are_measured_printed_and_stored() -> None:
    text = _run("--shapes", "8x16x24,3x4x5", "--dtype", "float32", "--device", "cpu", "--constant", "--layout", "nt")
    first, second = text.splitlines()[:2]
    assert first.startswith("8x16x24 float32 nt constant, call: vendor ")
    assert "<-" in first
    assert "; floor " in first
    assert second.startswith("3x4x5 float32 nt constant")
    again = _run("--device", "cpu")
    assert again.splitlines()[:2] == [first, second]


def test_how_to_fill_an_empty_table_is_printed() -> None:
    assert "nothing is measured yet; measure with --shapes MxNxK" in _run("--device", "cpu")


@pytest.mark.parametrize("words, why", [(("--shapes", "3x4"), "not MxNxK"), (("--shapes", "1x1x0"), "not MxNxK")])
def test_what_is_no_shape_is_an_error(words: tuple[str, ...], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        _run(*words)


def test_an_unknown_dtype_or_layout_is_an_error() -> None:
    with pytest.raises(UsageError, match="dtype 'int4' is not known"):
        _run("--shapes", "2x2x2", "--dtype", "int4")
    with pytest.raises(UsageError, match="layout 'xy' is not known"):
        _run("--shapes", "2x2x2", "--dtype", "float32", "--device", "cpu", "--layout", "xy")
