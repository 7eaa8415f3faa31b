"""An engine on disk: `engine.json` and the files that it names. A folder appears whole, and in the place of another at once.

weights.bin is 64 bytes of header (magic FLATOUTW, uint32 version 1, uint32 0, uint64 bytes of payload, 32 bytes of its SHA-256,
zeros), then the packed weights: they begin at a multiple of 64, so that the file can be mapped.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import secrets
import shutil
import stat
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

import msgspec

from flatout.blocks.inference.native.library import MODULE, FunctionTable, open_library
from flatout.core.errors import CheckpointError, NativeError, RecordError, UsageError
from flatout.core.files import path_inside, read_regular_file, sync_to_disk
from flatout.core.records.native import DTYPE_BYTES, NAME, NativeManifest, NativeReport
from flatout.core.records.record import from_json, to_json
from flatout.core.runtime.cache_folder import require_trusted, require_trusted_library

if TYPE_CHECKING:
    from torch import Tensor

MAGIC = b"FLATOUTW"
_HEADER = struct.Struct("<8sIIQ32s8x")
_ATTEMPTS = 5
_FIXED = frozenset(
    {"model.c", "model.h", "weights.bin", "engine.json", "report.json", "program.pt2"}
    | {"README.md", "example.cpp", "example.rs"}  # of examples.py
    | {"engine.pt2", "start.bin"}  # of aoti.py
)
_AT_CWD, _EXCHANGE = -100, 2
"""AT_FDCWD of fcntl.h, RENAME_EXCHANGE of linux/fs.h."""


class SavedProgram(Protocol):
    """What can pack other weights: `flatout.blocks.inference.native.program.SavedProgram`, or one still on disk."""

    def packed(self, state_dict: Mapping[str, Tensor], *, precision: Mapping[str, str] | None = None) -> bytes:
        """The block of weights for other numbers."""

    def save(self, path: Path) -> None:
        """Write the program to a file."""


class Parts(NamedTuple):
    """What an engine is made of, besides its weights."""

    manifest: NativeManifest
    source: str
    header: str
    library: bytes
    program: SavedProgram | None
    report: NativeReport | None = None


class StoredProgram(NamedTuple):
    """A program that is read when it is needed: that takes torch, and seconds."""

    path: Path
    sum: str | None
    """SHA-256 that the manifest told, if any."""

    def packed(self, state_dict: Mapping[str, Tensor], *, precision: Mapping[str, str] | None = None) -> bytes:
        """The block of weights for other numbers. CheckpointError when the file is gone or another."""

        from flatout.blocks.inference.native.program import Program

        self._read()
        return Program.load(self.path).packed(state_dict, precision=precision)

    def save(self, path: Path) -> None:
        """Write a copy of the stored program. Raises CheckpointError when the file is gone or another."""
        path.write_bytes(self._read())

    def _read(self) -> bytes:
        data = _bytes_of(self.path)
        require_trusted_library(self.path)  # torch.export evaluates expressions of it, and unpickles
        if self.sum and sha256_of(data) != self.sum:
            raise CheckpointError(
                f"'{self.path}' is not the program of this engine: its folder was replaced; load the engine anew"
            )
        return data


def weights_file(packed: bytes) -> bytes:
    """The content of weights.bin: a header with the SHA-256, and the packed weights."""
    return _HEADER.pack(MAGIC, 1, 0, len(packed), hashlib.sha256(packed).digest()) + packed


def read_weights(path: Path) -> bytes:
    """The packed weights of weights.bin. Raises CheckpointError when the file is torn, damaged or of another kind."""
    data = _bytes_of(path)
    if len(data) < _HEADER.size or not data.startswith(MAGIC):
        raise CheckpointError(
            f"'{path}' is no file of weights: it does not begin with {MAGIC.decode()}; save the engine anew"
        )
    _, version, _, size, checksum = _HEADER.unpack_from(data)
    packed = data[_HEADER.size :]
    if version != 1:
        raise CheckpointError(f"'{path}' has version {version} of the format, 1 is known; save the engine anew")
    if size != len(packed):
        raise CheckpointError(
            f"'{path}' is torn: {len(packed)} bytes of weights, its header tells of {size}; save the engine anew"
        )
    if hashlib.sha256(packed).digest() != checksum:
        raise CheckpointError(
            f"'{path}' is damaged: the SHA-256 of its weights is not the one in its header; save the engine anew"
        )
    return packed


def write_folder(
    folder: Path, parts: Parts, *, packed: bytes, libraries: Mapping[str, bytes], others: Mapping[str, bytes]
) -> None:
    """Write an engine, whole or not at all. An engine that is there is replaced in one step.

    `libraries` (whose sums are checked when it is read) and `others` are further files, by name. Raises UsageError when there is
    something else at `folder`, or files that are no engine's; CheckpointError when it cannot be written.
    """
    write_atomically(folder, lambda beside: _fill(beside, parts, packed, libraries, others))


def write_atomically(folder: Path, fill: Callable[[Path], None]) -> None:
    """Have `fill` write the files of an engine into a new folder, and put that into place. Raises as `write_folder`."""
    folder = Path(os.path.realpath(folder))  # a link to an engine stays one
    _refuse_other_things(folder)
    beside = folder.with_name(f".{folder.name}.{os.getpid()}-{secrets.token_hex(4)}.part")
    try:
        beside.mkdir()
        fill(beside)
        for path in (
            beside,
            *beside.iterdir(),
        ):  # it holds code: only the owner may write to it, whatever the umask says
            path.chmod(stat.S_IMODE(path.stat().st_mode) & ~(stat.S_IWGRP | stat.S_IWOTH))
        _put(beside, folder)
    except OSError as e:
        raise CheckpointError(
            f"cannot write the engine '{folder}': {e.strerror or e}; nothing was changed there"
        ) from e
    finally:
        shutil.rmtree(beside, ignore_errors=True)  # what was replaced, or what could not be finished


def read_folder(folder: Path) -> tuple[Parts, bytes, FunctionTable]:
    """An engine as it is on disk, its packed weights, and its library, loaded.

    Raises CheckpointError when a file is missing, torn or not the one that engine.json tells of; NativeError when the library is
    of another architecture, and when others than this user and root own the folder or its files, or may write to them: an engine
    is code. A folder that is replaced meanwhile is read again.
    """
    for _ in range(_ATTEMPTS):
        before = _identity(folder)
        try:
            found = _read(folder)
        except (CheckpointError, NativeError):
            if _identity(folder) == before:
                raise
        else:
            if _identity(folder) == before:
                return found
    raise CheckpointError(f"'{folder}' was replaced {_ATTEMPTS} times while it was read; load it when nobody is saving")


def _read(folder: Path) -> tuple[Parts, bytes, FunctionTable]:
    manifest = read_manifest(folder)
    if manifest is None:
        raise CheckpointError(f"'{folder}' holds no engine: engine.json is missing or damaged; save the engine anew")
    if "aoti" in manifest.isas:
        raise CheckpointError(
            f"'{folder}' holds an engine of the back end \"aoti\"; flatout.blocks.inference.native.aoti.load_aoti_engine reads it"
        )
    name = f"lib{manifest.name}.so"
    require_trusted(folder)
    library = _bytes_of(_inside(folder, name))
    for other in manifest.sums.keys() - {"program.pt2"}:
        if sha256_of(_bytes_of(_inside(folder, other))) != manifest.sums[other]:
            raise CheckpointError(
                f"'{folder / other}' is not the library that engine.json tells of; save the engine anew"
            )
    packed = read_weights(folder / "weights.bin")
    if sha256_of(packed) != manifest.weights_sum:
        raise CheckpointError(
            f"'{folder / 'weights.bin'}' holds other weights than engine.json tells of; save the engine anew"
        )
    program = folder / "program.pt2"
    parts = Parts(
        manifest=manifest,
        source=_bytes_of(folder / "model.c").decode(errors="replace"),
        header=_bytes_of(folder / "model.h").decode(errors="replace"),
        library=library,
        program=StoredProgram(program, manifest.sums.get(program.name)) if program.exists() else None,
        report=_report_of(folder),
    )
    for other in (name, *(manifest.sums.keys() - {"program.pt2"})):
        require_trusted(_inside(folder, other))
    return parts, packed, open_library(folder / name)


def _fill(
    folder: Path, parts: Parts, packed: bytes, libraries: Mapping[str, bytes], others: Mapping[str, bytes]
) -> None:
    libraries = {f"lib{parts.manifest.name}.so": parts.library, **libraries}
    sums = {name: sha256_of(library) for name, library in libraries.items()}
    if parts.program is not None:
        parts.program.save(folder / "program.pt2")
        sums["program.pt2"] = sha256_of((folder / "program.pt2").read_bytes())
    manifest = msgspec.structs.replace(
        parts.manifest, sums=sums, weights_sum=sha256_of(packed), weights_bytes=len(packed)
    )
    files = {**others, **libraries, "weights.bin": weights_file(packed), "engine.json": to_json(manifest)}
    files |= {"model.c": parts.source.encode(), "model.h": parts.header.encode()}
    if parts.report is not None:
        files["report.json"] = to_json(parts.report)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    for name in libraries:
        (folder / name).chmod(0o755)
    for path in (*folder.iterdir(), folder):
        sync_to_disk(path)


def _put(beside: Path, folder: Path) -> None:
    """The new folder to its place. What was there before lies at `beside` then."""
    if not folder.exists() or not any(folder.iterdir()):
        os.rename(beside, folder)
    elif not _exchange(beside, folder):
        # A file system without an exchange: between these two lines there is no engine here. The old one is not lost.
        older = beside.with_suffix(".old")
        os.rename(folder, older)
        try:
            os.rename(beside, folder)
        except OSError:
            os.rename(older, folder)
            raise
        os.rename(older, beside)
    sync_to_disk(folder.parent)


def _exchange(one: Path, other: Path) -> bool:
    """Two names for each other, in one step. False where the system or the file system cannot."""
    rename: Callable[..., int] | None = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    return rename(_AT_CWD, os.fsencode(one), _AT_CWD, os.fsencode(other), ctypes.c_uint(_EXCHANGE)) == 0


def _refuse_other_things(folder: Path) -> None:
    if not folder.parent.is_dir():
        raise UsageError(f"'{folder.parent}' is no folder; make it first")
    if not folder.exists():
        return
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else None
    if names is None:
        raise UsageError(f"'{folder}' is a file, not an engine; give another folder")
    if not names:
        return
    manifest = read_manifest(folder)
    if manifest is None:
        raise UsageError(f"'{folder}' is there and is no engine; give a folder that is empty, or none")
    others = sorted(names - _FIXED - {f"lib{manifest.name}.so"} - {n for n in names if n.startswith(MODULE)})
    if others:
        raise UsageError(
            f"'{folder}' holds {', '.join(others[:5])} beside an engine, which would be lost; move them, or give another folder"
        )


def read_manifest(folder: Path) -> NativeManifest | None:
    """What engine.json describes; None where it is missing or damaged, or describes what no engine has."""
    try:
        manifest = from_json(read_regular_file(path_inside(folder, "engine.json")), NativeManifest)
    except (OSError, RecordError):
        return None
    ports = (*manifest.inputs, *manifest.outputs, *manifest.state)
    is_sound = NAME.match(manifest.name) and all(
        port.dtype in DTYPE_BYTES and min(port.shape, default=0) >= 0 for port in ports
    )
    return manifest if is_sound else None


def _inside(folder: Path, name: str) -> Path:
    try:
        return path_inside(folder, name)
    except OSError as e:
        raise CheckpointError(f"'{folder / 'engine.json'}' is damaged: {e.strerror or e}; save the engine anew") from e


def _report_of(folder: Path) -> NativeReport | None:
    path = folder / "report.json"
    try:
        return from_json(read_regular_file(path), NativeReport)
    except FileNotFoundError:
        return None
    except (OSError, RecordError) as e:
        raise CheckpointError(f"'{path}' cannot be read: {e}; remove it, or save the engine anew") from e


def _bytes_of(path: Path) -> bytes:
    try:
        return read_regular_file(path)
    except OSError as e:
        raise CheckpointError(f"'{path}' cannot be read: {e.strerror or e}; save the engine anew") from e


def _identity(folder: Path) -> tuple[int, int, int] | None:
    """Which folder this is. Its time too: the number of one that is gone is given to the next."""
    try:
        found = folder.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_ctime_ns


def sha256_of(data: bytes) -> str:
    """The checksum that engine.json has of a file, or of packed weights."""
    return hashlib.sha256(data).hexdigest()
