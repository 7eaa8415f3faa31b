"""Files of the user: written whole or not at all, wherever a path leads."""

from __future__ import annotations

import errno
import os
import stat
import threading
from pathlib import Path

import pytest

from flatout.core import files
from flatout.core.errors import RecordError
from flatout.core.files import STANDARD_OUTPUT, is_stream, write_all_files, write_whole_file


def test_a_link_stays_a_link_and_its_file_is_written(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    target, link = tmp_path / "folder" / "report.json", tmp_path / "latest.json"
    link.symlink_to(target)
    for data in (b"one", b"two"):
        write_whole_file(link, data)
        assert link.is_symlink()
        assert target.read_bytes() == data
    assert sorted(p.name for p in (tmp_path / "folder").iterdir()) == ["report.json"]


def test_a_device_stays_a_device(tmp_path: Path) -> None:
    device = tmp_path / "null"
    device.symlink_to(os.devnull)
    write_whole_file(device, b"gone")
    write_whole_file(Path(os.devnull), b"gone")
    assert stat.S_ISCHR(os.stat(os.devnull).st_mode)
    assert device.is_symlink()


def test_a_pipe_is_written_to(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    received: list[bytes] = []
    reader = threading.Thread(target=lambda: received.append(pipe.read_bytes()))
    reader.start()
    write_whole_file(pipe, b"through")
    reader.join(timeout=30)
    assert received == [b"through"]
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_a_descriptor_gets_what_comes_behind_what_it_has(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w+b") as log:
        log.write(b"before ")
        log.flush()
        write_whole_file(Path(f"/dev/fd/{log.fileno()}"), b"after")
        write_whole_file(Path(f"/proc/self/fd/{log.fileno()}"), b"wards")
    assert (tmp_path / "log").read_bytes() == b"before afterwards"


def test_a_dash_is_standard_output(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_whole_file(STANDARD_OUTPUT, "größer\n".encode())
    assert capsys.readouterr().out == "größer\n"
    assert not list(tmp_path.iterdir())


def test_permissions_of_what_is_replaced_stay(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_bytes(b"old")
    path.chmod(0o640)
    write_whole_file(path, b"new")
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert path.read_bytes() == b"new"


def test_memory_shared_under_dev_is_a_place_for_files() -> None:
    assert not is_stream(Path("/dev/shm/report.json"))
    assert is_stream(Path("/dev/stdout"))
    assert not is_stream(Path("nowhere"))


def _no_space(path: Path, data: bytes) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_is_named_and_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "report.json"
    path.write_bytes(b"old")
    monkeypatch.setattr(Path, "write_bytes", _no_space)
    with pytest.raises(RecordError, match=r"report\.json': No space left on device; free some space"):
        write_whole_file(path, b"new")
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["report.json"]


def test_what_cannot_be_written_goes_elsewhere_and_the_others_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.setattr(files.tempfile, "tempdir", str(tmp_path / "elsewhere"))
    wanted = [
        (tmp_path / "gone" / "one.json", lambda: b"1"),
        (tmp_path / "two.json", lambda: b"2"),
        (tmp_path / "gone" / "three.html", lambda: b"3"),
    ]
    with pytest.raises(RecordError) as raised:
        write_all_files(wanted)
    assert (tmp_path / "two.json").read_bytes() == b"2"
    [one] = (tmp_path / "elsewhere").rglob("one.json")
    [three] = (tmp_path / "elsewhere").rglob("three.html")
    assert (one.read_bytes(), three.read_bytes()) == (b"1", b"3")
    for path in (one, three):
        assert f"it was written to '{path}'" in str(raised.value)


def test_where_nothing_can_be_written_the_error_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files.tempfile, "tempdir", str(tmp_path / "missing"))
    with pytest.raises(RecordError, match="there is no other place for it, either"):
        write_all_files([(tmp_path / "gone" / "one.json", lambda: b"1")])
