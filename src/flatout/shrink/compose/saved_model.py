"""A shrunk model written to a folder, and loaded from it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from pickle import PicklingError, UnpicklingError
from typing import Any, Final

import torch
from torch import nn

from flatout.core.errors import CheckpointError, RecordError, UsageError
from flatout.core.files import read_regular_file, write_whole_file
from flatout.core.records.record import Record, from_json, to_json
from flatout.core.records.reduction import Option
from flatout.core.registry import reduction_of
from flatout.core.tensors.nests import tree_map
from flatout.shrink.candidate import CandidateModel, ShrinkTask
from flatout.shrink.compose.described_model import describe_model, model_of_description, unknown_classes

PICKLE: Final = "model.pt"
DESCRIPTION: Final = "model.json"
TENSORS: Final = "model.safetensors"
HOW: Final = "how.json"
_VERSION: Final = 3
"""1 named levers, whose ids and classes lay elsewhere; 2 was always a pickle."""


class SavedComposition(Record, frozen=True, kw_only=True):
    """What was done to a model: the first `num_in_weights` reductions are in its weights, the others are applied on loading."""

    version: int = _VERSION
    composition: tuple[Option, ...]
    num_in_weights: int
    torch: str
    num_state: int = 0
    is_pickled: bool = False


class _Version(Record, frozen=True, kw_only=True):
    """The one field that every format of `how.json` has."""

    version: int


def require_savable(candidate: CandidateModel) -> None:
    """Raises UsageError where the model cannot be written without a pickle; the message says why."""
    try:
        describe_model(_saved(candidate), "the model", "its inputs")
    except UsageError as e:
        raise UsageError(f"{e}; allow it with --allow-pickle (allow_pickle=True)") from e


def write_shrunk(
    candidate: CandidateModel, composition: tuple[Option, ...], folder: Path, *, allow_pickle: bool = False
) -> None:
    """`model.json` with `model.safetensors`, and `how.json`, whole or not at all; the first holds the example inputs, too.

    Where the model cannot be described so (it holds a function of the user's, say), and `allow_pickle`, `model.pt` is written
    in their place. Raises UsageError when neither can be, or the folder cannot be written.
    """
    files: dict[str, Callable[[Path], None]]
    try:
        text, tensors = describe_model(_saved(candidate), "the model", "its inputs")
        files = {
            DESCRIPTION: lambda path: write_whole_file(path, text),
            TENSORS: lambda path: write_whole_file(path, tensors),
        }
    except UsageError as e:
        if not allow_pickle:
            raise UsageError(f"{e}; allow it with --allow-pickle (allow_pickle=True)") from e
        files = {PICKLE: lambda path: _write_pickle(candidate, path)}
    how = SavedComposition(
        composition=composition,
        num_in_weights=sum(reduction_of(option.reduction).kind != "engine" for option in composition),
        torch=str(torch.__version__),
        num_state=candidate.task.num_state,
        is_pickled=PICKLE in files,
    )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, write in files.items():
            write(folder / name)
        write_whole_file(folder / HOW, to_json(how))
        for name in {PICKLE, DESCRIPTION, TENSORS} - set(files):  # of what was written here before
            (folder / name).unlink(missing_ok=True)
    except OSError as e:
        raise UsageError(f"cannot write '{folder}': {e.strerror or e}; give a folder that can be written") from e
    except RecordError as e:
        raise UsageError(str(e)) from e


def _write_pickle(candidate: CandidateModel, path: Path) -> None:
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".model", delete=False) as file:
            torch.save(_saved(candidate), file)
        Path(file.name).replace(path)
    except (AttributeError, TypeError, PicklingError) as e:  # what pickle raises for classes inside of functions
        raise UsageError(f"the model cannot be pickled: {e}; define its classes at the top of a module") from e


def load_shrunk(folder: str | Path, *, classes: Iterable[type] = (), allow_pickle: bool = False) -> Callable[..., Any]:
    """Load what `flatout shrink -o` wrote; what runs the model (compiled, native) is built again here.

    No code of the file runs: the model is put together from torch's layers and flatout's.

    Args:
        folder: The folder that was written.
        classes: Classes of your own that the model has objects of: its modules, say. They are filled, not called.
        allow_pickle: Load a pickled module, too, which runs any code that whoever wrote it put there: only for what you wrote
            yourself.

    Returns:
        What is called as the model is; with a state `StatefulModel`, which carries it.

    Raises:
        CheckpointError: A file is missing, torn, or of another version; it has objects of a class that was not passed; or it is
            a pickle, and `allow_pickle` was not given.
    """
    folder = Path(folder)
    try:
        text = read_regular_file(folder / HOW)
        version = from_json(text, _Version).version
        if version != _VERSION:
            raise CheckpointError(
                f"'{folder / HOW}' has format {version}, this flatout reads {_VERSION}; write it anew with flatout shrink"
            )
        how = from_json(text, SavedComposition)
        if how.is_pickled:
            model, inputs = _unpickled(folder, allow_pickle=allow_pickle)
        else:
            description = read_regular_file(folder / DESCRIPTION), read_regular_file(folder / TENSORS)
            model, inputs = _pair(model_of_description(*description, classes))
    except OSError as e:
        raise CheckpointError(f"'{folder}' holds no model of flatout shrink: {e.strerror or e}") from e
    except RecordError as e:
        raise CheckpointError(f"'{folder / HOW}' cannot be read: {e}; write it anew with flatout shrink") from e
    except CheckpointError as e:
        raise CheckpointError(f"'{folder}': {e}") from e
    candidate = CandidateModel.of(model, ShrinkTask(inputs=inputs, num_state=how.num_state, evaluate=_nothing))
    for option in how.composition[how.num_in_weights :]:
        candidate = reduction_of(option.reduction).apply(candidate, option.parameters)
    return candidate.usable


def loading_call(folder: Path) -> str:
    """How the folder is loaded, as a line of Python. Raises CheckpointError or RecordError where it cannot be read."""
    try:
        how = from_json(read_regular_file(folder / HOW), SavedComposition)
        names = [] if how.is_pickled else unknown_classes(read_regular_file(folder / DESCRIPTION))
    except OSError as e:
        raise CheckpointError(f"'{folder}' holds no model of flatout shrink: {e.strerror or e}") from e
    extra = ", allow_pickle=True" if how.is_pickled else f", classes=[{', '.join(names)}]" if names else ""
    return f"flatout.load_shrunk('{folder}'{extra})"


def _unpickled(folder: Path, *, allow_pickle: bool) -> tuple[nn.Module, tuple[Any, ...]]:
    if not allow_pickle:
        raise CheckpointError(
            "it holds a pickled module, and loading that runs the code that it names; give allow_pickle=True for what you wrote "
            "yourself"
        )
    try:
        return _pair(torch.load(folder / PICKLE, weights_only=False))  # the caller's explicit word
    except (
        RuntimeError,
        EOFError,
        ImportError,
        AttributeError,
        LookupError,
        TypeError,
        ValueError,
        UnpicklingError,
    ) as e:
        # a class that is elsewhere now, too
        raise CheckpointError(f"'{PICKLE}' cannot be read: {e}; write it anew with flatout shrink") from e


def _saved(candidate: CandidateModel) -> tuple[nn.Module, tuple[Any, ...]]:
    """What is written: the module, and the inputs of one call."""
    inputs: tuple[Any, ...] = tree_map(_alone, candidate.inputs)
    return candidate.model, inputs


def _pair(saved: object) -> tuple[nn.Module, tuple[Any, ...]]:
    match saved:
        case (nn.Module() as model, tuple() as inputs):
            return model, inputs
    raise CheckpointError("what it holds is no model with its inputs")


def _alone(value: Any) -> Any:
    """A tensor without what else lies in its storage."""
    return value.clone() if isinstance(value, torch.Tensor) else value


def _nothing(call: Callable[..., Any]) -> float:
    return 0.0
