from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from flatout.cli.app import app
from flatout.errors import UsageError
from flatout.kernels.matmul import choosing, table


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    before = table.folder()
    yield
    table.keep_in(before)
    choosing.forget()


def _run(*words: str) -> str:
    result = CliRunner().invoke(app, ["matmul", *words], catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


def test_shapes_are_measured_printed_and_kept() -> None:
    text = _run("--shapes", "8x16x24,3x4x5", "--dtype", "float32", "--device", "cpu", "--kept", "--layout", "nt")
    first, second = text.splitlines()[:2]
    assert first.startswith("8x16x24 float32 nt kept, call: vendor ")
    assert "<-" in first
    assert "; floor " in first
    assert second.startswith("3x4x5 float32 nt kept")
    again = _run("--device", "cpu")
    assert again.splitlines()[:2] == [first, second]


def test_an_empty_table_says_how_to_fill_it() -> None:
    assert "nothing is kept yet; measure with --shapes MxNxK" in _run("--device", "cpu")


@pytest.mark.parametrize("words, why", [(("--shapes", "3x4"), "not MxNxK"), (("--shapes", "1x1x0"), "not MxNxK")])
def test_what_is_no_shape_is_an_error(words: tuple[str, ...], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        _run(*words)


def test_an_unknown_dtype_or_layout_is_an_error() -> None:
    with pytest.raises(UsageError, match="dtype 'int4' is not known"):
        _run("--shapes", "2x2x2", "--dtype", "int4")
    with pytest.raises(UsageError, match="layout 'xy' is not known"):
        _run("--shapes", "2x2x2", "--dtype", "float32", "--device", "cpu", "--layout", "xy")
