from __future__ import annotations

from pathlib import Path

import pytest

from flatout.core.errors import EditError
from flatout.core.records.lever import Parameters
from flatout.tune.rewrite import edit_cache
from flatout.tune.rewrite.edit_cache import edited_text


class Edit:
    """Adds a line, and counts how often it is asked to."""

    num_calls = 0

    def __call__(self, text: str, parameters: Parameters) -> str:
        self.num_calls += 1
        if not text:
            raise EditError("there is nothing to change")
        return f"{text}# {parameters['word']}\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "flatout" / "texts"


def test_the_same_edit_is_made_once_and_any_other_anew(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    edit = Edit()
    for _ in range(3):
        assert edited_text("a.b", "é = 1\n", {"word": "ü"}, edit) == "é = 1\n# ü\n"
    assert edit.num_calls == 1
    assert edited_text("a.b", "é = 1\n", {"word": "v"}, edit) == "é = 1\n# v\n"
    assert edited_text("a.b", "é = 2\n", {"word": "ü"}, edit) == "é = 2\n# ü\n"
    edited_text("a.c", "é = 1\n", {"word": "ü"}, edit)
    assert edit.num_calls == 4
    monkeypatch.setattr(edit_cache, "_state_of_code", lambda: [1, 1])
    edited_text("a.b", "é = 1\n", {"word": "ü"}, edit)
    assert edit.num_calls == 5, "made by other code"


def test_what_cannot_be_edited_is_an_error_each_time(folder: Path) -> None:
    edit = Edit()
    for number in (1, 2):
        with pytest.raises(EditError, match="nothing to change"):
            edited_text("a.b", "", {}, edit)
        assert edit.num_calls == number


def test_texts_that_others_could_have_written_are_not_taken(folder: Path) -> None:
    edit = Edit()
    edited_text("a.b", "x\n", {"word": "w"}, edit)
    [path] = folder.iterdir()
    path.write_text("harm()\n")
    path.chmod(0o666)
    assert edited_text("a.b", "x\n", {"word": "w"}, edit) == "x\n# w\n"


def test_without_a_folder_that_can_be_written_it_is_edited_all_the_same(folder: Path) -> None:
    folder.parent.mkdir()
    folder.write_text("a file")
    edit = Edit()
    assert edited_text("a.b", "x\n", {"word": "w"}, edit) == "x\n# w\n"


def test_the_oldest_texts_go_where_there_are_many(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edit_cache, "_MOST", 3)
    for number in range(6):
        edited_text("a.b", f"{number}\n", {"word": "w"}, Edit())
    assert len(list(folder.iterdir())) == 3
