"""A search on disk: Optuna's study, weights of the proof, and a lock; what a kill leaves behind is put right."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from flatout.core.errors import UsageError
from flatout.core.tensors.checksum import checksum
from flatout.shrink.checkpoint_file import write_checkpoint_file

_NAME: Final = "search_architecture"
_WHAT: Final = "what"
_DATABASES: Final = (".db", ".sqlite", ".sqlite3")


def optuna() -> ModuleType:
    """Raises UsageError where it is not installed."""
    try:
        import optuna as found
    except ImportError as e:
        raise UsageError("a search needs Optuna; pip install 'flatout[search]'") from e
    return found


@contextmanager
def quiet() -> Iterator[None]:
    """Optuna's own log says no more than warnings; the verbosity is put back."""
    logging = optuna().logging
    before = logging.get_verbosity()
    logging.set_verbosity(logging.WARNING)
    try:
        yield
    finally:
        logging.set_verbosity(before)


@contextmanager
def locked(storage: Path) -> Iterator[None]:
    """Alone with a storage; the lock goes with the process that has it. Raises UsageError when another one has it."""
    import fcntl  # POSIX only

    path = storage.with_name(storage.name + ".flatout")
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as e:
        raise UsageError(f"'{path}' cannot be made: {e.strerror or e}; give a storage in a folder that exists") from e
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as e:
        os.close(descriptor)
        raise UsageError(f"another process searches in '{storage}'; wait for it, or give another storage") from e
    try:
        yield
    finally:
        os.close(descriptor)


def opened(storage: Path, what: Mapping[str, object], *, sampler: Any, pruner: Any) -> Any:
    """The study, begun or gone on with: '.db' and '.sqlite' are SQLite, all else Optuna's journal. Hold the lock.

    Raises UsageError when the storage is of another search: another space, limit, seed or original model.
    """
    found = optuna()
    is_database = storage.suffix in _DATABASES
    # Without a pool no connection stays open behind the search, of which Python 3.13 and later warn.
    if not is_database:
        _mend(storage)
    kinds = found.storages
    tensors = (
        kinds.RDBStorage(f"sqlite:///{storage}", engine_kwargs={"poolclass": import_module("sqlalchemy.pool").NullPool})
        if is_database
        else kinds.JournalStorage(kinds.journal.JournalFileBackend(str(storage)))
    )
    study = found.create_study(
        storage=tensors, study_name=_NAME, direction="maximize", sampler=sampler, pruner=pruner, load_if_exists=True
    )
    text = json.dumps(dict(what), sort_keys=True, default=str)
    known = study.user_attrs.get(_WHAT)
    if known is None:
        study.set_user_attr(_WHAT, text)
    elif known != text:
        raise UsageError(f"'{storage}' holds another search: {_differences(known, text)}; give another storage")
    return study


def _mend(storage: Path) -> None:
    """A process that was killed while it wrote leaves half a line, to which the next would be joined, and Optuna's lock."""
    Path(f"{storage}.lock").unlink(missing_ok=True)
    if not storage.exists():
        return
    with storage.open("r+b") as file:
        data = file.read()
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            file.truncate(whole)


def _differences(known: str, now: str) -> str:
    a, b = json.loads(known), json.loads(now)
    return ", ".join(
        f"{key} was {a.get(key)} and is {b.get(key)}" for key in sorted({*a, *b}) if a.get(key) != b.get(key)
    )


def save_weights(storage: Path, name: str, state: Mapping[str, Tensor]) -> None:
    """A model's state in a file beside a storage, whole or not there; tensors that share memory are saved once each."""
    path = _weights_file(storage, name)
    path.parent.mkdir(exist_ok=True)
    write_checkpoint_file(path, save({key: value.detach().cpu().contiguous().clone() for key, value in state.items()}))


def load_weights(storage: Path, name: str) -> dict[str, Tensor] | None:
    """What `save_weights` wrote; None when it is not there or cannot be read."""
    try:
        return load_file(_weights_file(storage, name))
    except (OSError, SafetensorError):
        return None


def _weights_file(storage: Path, name: str) -> Path:
    return storage.with_name(f"{storage.name}.weights") / f"{name}.safetensors"


def state_fingerprint(state: Mapping[str, Tensor]) -> str:
    """Fingerprint of weights: their names, shapes and bits."""
    total = 0
    for name in sorted(state):
        text = f"{total},{name},{tuple(state[name].shape)},{state[name].dtype},{checksum(state[name])}"
        total = zlib.crc32(text.encode())
    return f"{total:08x}"
