from __future__ import annotations

import os
from pathlib import Path

import pytest

from flatout.core.errors import NativeError, RecordError
from flatout.core.runtime.cache_folder import (
    create_cache_folder,
    create_code_folder,
    default_cache_folder,
    require_trusted,
    require_trusted_library,
)


def test_the_folder_is_in_xdg_cache_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    assert default_cache_folder() == tmp_path / "flatout"


@pytest.mark.parametrize("value", ["", "relative/path"])
def test_without_an_absolute_xdg_cache_home_it_is_in_the_home_folder(
    value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", value)
    monkeypatch.setenv("HOME", str(tmp_path))

    assert default_cache_folder() == tmp_path / ".cache" / "flatout"


def test_a_new_folder_is_for_its_owner_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        create_cache_folder(tmp_path / "a" / "flatout")
    finally:
        os.umask(before)

    assert (tmp_path / "a" / "flatout").stat().st_mode & 0o777 == 0o700


def test_a_folder_that_cannot_be_created_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(RecordError, match=r"cannot create the folder .*give another one"):
        create_cache_folder(tmp_path / "file" / "folder")
    with pytest.raises(NativeError, match="cannot create the folder"):
        create_code_folder(tmp_path / "file" / "folder")


def test_code_is_loaded_from_a_folder_of_ones_own(tmp_path: Path) -> None:
    create_code_folder(tmp_path / "flatout")
    library = tmp_path / "flatout" / "lib.so"
    library.touch(mode=0o755)

    require_trusted_library(library)


@pytest.mark.parametrize("mode", [0o770, 0o707])
def test_a_folder_that_others_can_write_to_is_refused(mode: int, tmp_path: Path) -> None:
    folder = tmp_path / "flatout"
    folder.mkdir()
    folder.chmod(mode)
    (folder / "lib.so").touch(mode=0o600)

    with pytest.raises(NativeError, match=r"can be written by other users.*chmod go-w"):
        create_code_folder(folder)
    with pytest.raises(NativeError, match="can be written by other users"):
        require_trusted_library(folder / "lib.so")


def test_a_library_that_others_can_write_to_is_refused(tmp_path: Path) -> None:
    create_code_folder(tmp_path / "flatout")
    library = tmp_path / "flatout" / "lib.so"
    library.touch()
    library.chmod(0o666)

    with pytest.raises(NativeError, match=r"lib.so' can be written by other users"):
        require_trusted_library(library)


def test_a_folder_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = tmp_path.stat().st_uid
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    if owner == 0:
        os.chown(tmp_path, 4711, -1)
        owner = 4711

    with pytest.raises(NativeError, match=f"belongs to user {owner}, and code is loaded from it"):
        require_trusted(tmp_path)


def test_a_missing_library_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(NativeError, match="cannot read"):
        require_trusted(tmp_path / "missing.so")
