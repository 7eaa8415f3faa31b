from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from tests.blocks.inference.native import hand_made
from tests.blocks.inference.native.hand_made import average, compiled_engine, pair, weights

from flatout.blocks.inference.native import folder as folders
from flatout.blocks.inference.native.engine import Engine
from flatout.blocks.inference.native.folder import StoredProgram, read_folder, read_weights, weights_file
from flatout.core.errors import CheckpointError, NativeError, UsageError
from flatout.core.records.native import NativeManifest, NativeReport
from flatout.core.records.record import from_json, to_json

X = np.array([1, 2, 3], np.float32)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def engine(cache: Path) -> Engine:
    return compiled_engine(average(), cache=cache)


@pytest.fixture(scope="module")
def other(cache: Path) -> Engine:
    return compiled_engine(pair(), cache=cache)


@pytest.fixture
def saved(engine: Engine, tmp_path: Path) -> Path:
    engine.save(tmp_path / "model")
    return tmp_path / "model"


def only(tmp_path: Path) -> list[str]:
    """Names in a folder."""
    return sorted(path.name for path in tmp_path.iterdir())


# --------------------------------------------------------------------------------------------------------------------- saving


@pytest.mark.slow
def test_a_saved_engine_is_the_same_engine(engine: Engine, saved: Path, cache: Path) -> None:
    loaded = Engine.load(saved, cache=cache)

    engine.reset()
    assert [loaded.step(X).tobytes() for _ in range(5)] == [engine.step(X).tobytes() for _ in range(5)]
    assert loaded.snapshot() == engine.snapshot()
    assert (loaded.isa, loaded.source) == (engine.isa, engine.source)
    assert msgspec.structs.replace(loaded.manifest, sums={}) == engine.manifest
    assert loaded.report is None


def test_the_folder_holds_what_it_says(saved: Path, tmp_path: Path) -> None:
    (extension,) = (name for name in only(saved) if name.startswith("flatout_caller-"))
    assert only(saved) == [
        *("README.md", "engine.json", "example.cpp", "example.rs", extension, "libaverage.so", "model.c", "model.h"),
        *("program.pt2", "weights.bin"),
    ]
    assert only(tmp_path) == ["model"]
    manifest = from_json((saved / "engine.json").read_bytes(), NativeManifest)
    assert set(manifest.sums) == {"libaverage.so", extension, "program.pt2"}
    for name, sum_ in manifest.sums.items():
        assert hashlib.sha256((saved / name).read_bytes()).hexdigest() == sum_


def test_present_weights_are_saved(cache: Path, tmp_path: Path) -> None:
    engine = compiled_engine(average(), cache=cache)
    engine.load_weights(weights(1.0))
    engine.save(tmp_path / "model")

    assert np.array_equal(Engine.load(tmp_path / "model", cache=cache).step(X), [6, 6])


def test_an_engine_takes_the_place_of_another(engine: Engine, other: Engine, tmp_path: Path, cache: Path) -> None:
    where = tmp_path / "model"
    (tmp_path / "model").mkdir()
    engine.save(where)
    first = Engine.load(where, cache=cache)
    other.save(where)

    assert Engine.load(where, cache=cache).manifest.name == "pair"
    assert not (where / "libaverage.so").exists() and only(tmp_path) == ["model"]
    first.reset()
    assert np.array_equal(first.step(X), [14, 32])  # what was loaded goes on


def test_a_file_system_without_an_exchange_will_do(
    engine: Engine, other: Engine, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folders, "_exchange", lambda one, two: False)

    other.save(saved)

    assert (saved / "libpair.so").exists() and not (saved / "libaverage.so").exists()
    assert only(tmp_path) == ["model"]


def test_a_link_to_an_engine_stays_one(other: Engine, saved: Path, tmp_path: Path) -> None:
    link = tmp_path / "current"
    link.symlink_to(saved)

    other.save(link)

    assert link.is_symlink() and (saved / "libpair.so").exists()


def test_what_is_no_engine_is_never_written_over(engine: Engine, saved: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "engine.json").write_text('{"mine": 1}')
    (saved / "notes.txt").write_text("mine")

    for where, message in (
        ("file", "is a file"),
        ("folder", "is there and is no engine"),
        ("model", "holds notes.txt beside an engine"),
        ("nowhere/model", "is no folder; make it first"),
    ):
        with pytest.raises(UsageError, match=message):
            engine.save(tmp_path / where)

    assert (tmp_path / "file").read_text() == "mine" and (saved / "notes.txt").read_text() == "mine"
    assert only(tmp_path / "folder") == ["engine.json"] and only(tmp_path) == ["file", "folder", "model"]


@pytest.mark.parametrize("failing", ["write_bytes", "chmod", "rename"])
def test_a_save_that_fails_leaves_the_older_engine(
    other: Engine, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    before = {path.name: path.read_bytes() for path in saved.iterdir()}

    def fail(*unused: object, **also: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        if failing == "rename":
            patch.setattr(folders, "_exchange", lambda one, two: False)
            patch.setattr(folders.os, "rename", fail)
        else:
            patch.setattr(Path, failing, fail)
        with pytest.raises(CheckpointError, match=r"cannot write the engine .*No space left"):
            other.save(saved)

    assert {path.name: path.read_bytes() for path in saved.iterdir()} == before
    assert only(tmp_path) == ["model"]


def test_the_older_engine_comes_back_where_the_new_one_cannot_take_its_place(
    other: Engine, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folders, "_exchange", lambda one, two: False)
    rename, calls = os.rename, []

    def second_fails(one: Path, two: Path) -> None:
        calls.append(one)
        if len(calls) == 2:
            raise OSError(5, "Input/output error")
        rename(one, two)

    monkeypatch.setattr(folders.os, "rename", second_fails)
    with pytest.raises(CheckpointError, match="Input/output error"):
        other.save(saved)

    assert (saved / "libaverage.so").exists() and only(tmp_path) == ["model"]


def test_who_loads_while_others_save_gets_one_or_the_other(
    engine: Engine, other: Engine, saved: Path, cache: Path
) -> None:
    stop = threading.Event()
    failed: list[BaseException] = []

    def save() -> None:
        try:
            while not stop.is_set():
                other.save(saved)
                engine.save(saved)
        except BaseException as e:  # noqa: BLE001 told by the test
            failed.append(e)

    thread = threading.Thread(target=save)
    thread.start()
    names = set()
    try:
        for _ in range(30):
            try:
                parts, _, library = read_folder(saved)
            except CheckpointError as e:
                assert "was replaced 5 times" in str(e)
                continue
            names.add(parts.manifest.name)
            assert library.num_inputs == len(parts.manifest.inputs)
    finally:
        stop.set()
        thread.join()
    assert not failed and names <= {"average", "pair"}


# ------------------------------------------------------------------------------------------------------------------- weights


def test_the_weights_begin_at_a_multiple_of_64() -> None:
    data = weights_file(b"abc")

    assert data[:16] == b"FLATOUTW" + (1).to_bytes(4, "little") + bytes(4)
    assert data[16:24] == (3).to_bytes(8, "little")
    assert data[24:56] == hashlib.sha256(b"abc").digest()
    assert data[56:] == bytes(8) + b"abc"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data[:-1], "is torn: 63 bytes of weights, its header tells of 64"),
        (lambda data: data + b"\0", "is torn: 65 bytes"),
        (lambda data: data[:40], "is no file of weights"),
        (lambda data: b"", "is no file of weights"),
        (lambda data: b"\0" * len(data), "does not begin with FLATOUTW"),
        (lambda data: data[:70] + bytes([data[70] ^ 1]) + data[71:], "is damaged: the SHA-256"),
        (lambda data: data[:30] + bytes([data[30] ^ 1]) + data[31:], "is damaged: the SHA-256"),
        (lambda data: data[:8] + b"\2" + data[9:], "has version 2 of the format, 1 is known"),
        (
            lambda data: weights_file(hand_made.packed(np.zeros(6, np.float32))),
            "other weights than engine.json tells of",
        ),
    ],
    ids=["short", "long", "header", "empty", "zeros", "bit", "sum", "version", "others"],
)
def test_weights_that_are_torn_or_damaged_are_refused(saved: Path, cache: Path, change, message: str) -> None:  # type: ignore[no-untyped-def]
    path = saved / "weights.bin"
    path.write_bytes(change(path.read_bytes()))

    with pytest.raises(CheckpointError, match=message):
        Engine.load(saved, cache=cache)


def test_read_weights_gives_what_was_written(tmp_path: Path) -> None:
    (tmp_path / "weights.bin").write_bytes(weights_file(b"12345"))

    assert read_weights(tmp_path / "weights.bin") == b"12345"


# ------------------------------------------------------------------------------------------------------------------- loading


@pytest.mark.parametrize("name", ["weights.bin", "libaverage.so", "model.c", "model.h", "engine.json"])
def test_a_missing_file_is_named(saved: Path, cache: Path, name: str) -> None:
    (saved / name).unlink()

    with pytest.raises(CheckpointError, match=name):
        Engine.load(saved, cache=cache)


def test_what_is_no_engine_is_not_loaded(tmp_path: Path, saved: Path, cache: Path) -> None:
    with pytest.raises(CheckpointError, match="holds no engine"):
        Engine.load(tmp_path / "nowhere", cache=cache)

    manifest = from_json((saved / "engine.json").read_bytes(), NativeManifest)
    (saved / "engine.json").write_bytes(to_json(msgspec.structs.replace(manifest, isas=("aoti",))))
    with pytest.raises(CheckpointError, match=r"flatout.blocks.inference.native.aoti.load_aoti_engine reads it"):
        Engine.load(saved, cache=cache)


def test_a_library_that_was_changed_is_refused(saved: Path, cache: Path) -> None:
    path = saved / "libaverage.so"
    path.write_bytes(path.read_bytes()[:-1])

    with pytest.raises(CheckpointError, match=r"is not the library that engine.json tells of"):
        Engine.load(saved, cache=cache)


def test_a_library_of_another_architecture_is_told(saved: Path, cache: Path) -> None:
    path = saved / "libaverage.so"
    data = bytearray(path.read_bytes())
    data[18] ^= 1  # e_machine of the ELF header
    path.write_bytes(data)
    manifest = from_json((saved / "engine.json").read_bytes(), NativeManifest)
    (saved / "engine.json").write_bytes(to_json(msgspec.structs.replace(manifest, sums={})))

    with pytest.raises(NativeError, match="runs on the architecture that it was built for"):
        Engine.load(saved, cache=cache)


def test_a_report_is_saved_and_loaded(engine: Engine, tmp_path: Path, cache: Path) -> None:
    report = NativeReport(
        hardware="some CPU", isa="plain", compiler="cc", build_s=1.0, layers=(), weight_bytes=64, state_bytes=64
    )
    copied = engine.copy()
    copied.attach(report)
    copied.save(tmp_path / "model")

    assert Engine.load(tmp_path / "model", cache=cache).report == report
    (tmp_path / "model" / "report.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"report.json"):
        Engine.load(tmp_path / "model", cache=cache)


def test_an_engine_is_loaded_and_stepped_without_torch(saved: Path, cache: Path) -> None:
    code = f"""
import sys
from pathlib import Path
from flatout.blocks.inference.native.engine import Engine
engine = Engine.load({str(saved)!r}, cache=Path({str(cache)!r}))
out = bytearray(8)
engine.step(bytes(12), out)
assert bytes(out) == bytes(8)
assert "numpy" not in sys.modules
assert engine.step(bytes(12)).shape == (2,)
engine.save({str(saved)!r})
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


# ------------------------------------------------------------------------------------------------------------------ programs


def test_a_loaded_engine_takes_other_weights(saved: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Path] = []
    fake = SimpleNamespace(Program=SimpleNamespace(load=lambda path: read.append(path) or hand_made.Packing()))
    monkeypatch.setitem(sys.modules, "flatout.blocks.inference.native.program", fake)
    loaded = Engine.load(saved, cache=cache)

    loaded.load_weights(weights(1.0))

    assert np.array_equal(loaded.step(X), [6, 6]) and read == [saved / "program.pt2"]


def test_the_precision_that_was_chosen_is_that_of_other_weights(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(hand_made.Packing, "packed", lambda self, _, *, precision: seen.append(precision) or bytes(64))
    engine, _ = Engine.compiled(
        average(), program=hand_made.Packing(), versions=("2", "0"), precision={"w": "int8"}, isas=(), cache=cache
    )

    engine.load_weights(weights(1.0))

    assert seen == [{"w": "int8"}]


def test_the_program_of_another_engine_is_not_taken(saved: Path, cache: Path, tmp_path: Path) -> None:
    loaded = Engine.load(saved, cache=cache)
    (saved / "program.pt2").write_bytes(b"another")

    for act in (lambda: loaded.load_weights(weights(1.0)), lambda: loaded.save(tmp_path / "copy")):
        with pytest.raises(CheckpointError, match="is not the program of this engine"):
            act()
    shutil.rmtree(saved)
    with pytest.raises(CheckpointError, match="cannot be read"):
        loaded.load_weights(weights(1.0))


def test_without_a_program_weights_stay(saved: Path, cache: Path) -> None:
    (saved / "program.pt2").unlink()

    with pytest.raises(UsageError, match=r"without program.pt2"):
        Engine.load(saved, cache=cache).load_weights(weights(1.0))


def test_a_loaded_engine_is_saved_with_its_program(saved: Path, cache: Path, tmp_path: Path) -> None:
    loaded = Engine.load(saved, cache=cache)
    loaded.save(tmp_path / "copy")
    loaded.save(saved)  # over itself

    for where in (tmp_path / "copy", saved):
        assert (where / "program.pt2").read_bytes() == b"a program"
        again = Engine.load(where, cache=cache)
        assert again._parts.program == StoredProgram(where / "program.pt2", again.manifest.sums["program.pt2"])
