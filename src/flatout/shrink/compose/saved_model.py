"""A shrunk model written to a folder, and loaded from it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from pickle import UnpicklingError
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

MODEL: Final = "model.pt"
HOW: Final = "how.json"
_VERSION: Final = 2
"""1 named levers, whose ids and classes lay elsewhere."""


class SavedComposition(Record, frozen=True, kw_only=True):
    """What was done to a model: the first `num_in_weights` reductions are in its weights, the others are applied on loading."""

    version: int = _VERSION
    composition: tuple[Option, ...]
    num_in_weights: int
    torch: str


class _Version(Record, frozen=True, kw_only=True):
    """The one field that every format of `how.json` has."""

    version: int


def write_shrunk(candidate: CandidateModel, composition: tuple[Option, ...], folder: Path) -> None:
    """`model.pt` (the module, pickled, with example inputs) and `how.json`, whole or not at all.

    Raises UsageError when the module cannot be pickled, or the folder cannot be written.
    """
    num_in_weights = sum(reduction_of(option.reduction).kind != "engine" for option in composition)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".model", delete=False) as file:
            inputs = tree_map(_alone, candidate.inputs)
            saved = {"model": candidate.model, "inputs": inputs, "num_state": candidate.task.num_state}
            torch.save(saved, file)
        Path(file.name).replace(folder / MODEL)
    except OSError as e:
        raise UsageError(f"cannot write '{folder}': {e.strerror or e}; give a folder that can be written") from e
    except (AttributeError, TypeError) as e:  # what pickle raises for classes inside of functions
        raise UsageError(f"the model cannot be pickled: {e}; define its classes at the top of a module") from e
    how = SavedComposition(composition=composition, num_in_weights=num_in_weights, torch=str(torch.__version__))
    write_whole_file(folder / HOW, to_json(how))


def load_shrunk(folder: str | Path, *, allow_pickle: bool = False) -> Callable[..., Any]:
    """Load what `flatout shrink -o` wrote; what runs the model (compiled, native) is built again here.

    Args:
        folder: The folder that was written. It holds a pickled module.
        allow_pickle: Load that, which runs any code that whoever wrote it put there: only for what you wrote yourself.

    Returns:
        What is called as the model is; with a state `StatefulModel`, which carries it.

    Raises:
        CheckpointError: A file is missing, torn, or of another version; or `allow_pickle` was not given.
    """
    folder = Path(folder)
    if not allow_pickle:
        raise CheckpointError(
            f"'{folder}' holds a pickled module, and loading it runs the code that it names; "
            "give allow_pickle=True for what you wrote yourself"
        )
    try:
        text = read_regular_file(folder / HOW)
        version = from_json(text, _Version).version
        if version != _VERSION:
            raise CheckpointError(
                f"'{folder / HOW}' has format {version}, this flatout reads {_VERSION}; write it anew with flatout shrink"
            )
        how = from_json(text, SavedComposition)
        saved = torch.load(folder / MODEL, weights_only=False)  # the caller's explicit word
        model: nn.Module = saved["model"]
        task = ShrinkTask(inputs=saved["inputs"], num_state=saved["num_state"], evaluate=_nothing)
    except OSError as e:
        raise CheckpointError(f"'{folder}' holds no model of flatout shrink: {e.strerror or e}") from e
    except RecordError as e:
        raise CheckpointError(f"'{folder / HOW}' cannot be read: {e}; write it anew with flatout shrink") from e
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
        raise CheckpointError(f"'{folder / MODEL}' cannot be read: {e}; write it anew with flatout shrink") from e
    candidate = CandidateModel.of(model, task)
    for option in how.composition[how.num_in_weights :]:
        candidate = reduction_of(option.reduction).apply(candidate, option.parameters)
    return candidate.usable


def _alone(value: Any) -> Any:
    """A tensor without what else lies in its storage."""
    return value.clone() if isinstance(value, torch.Tensor) else value


def _nothing(call: Callable[..., Any]) -> float:
    return 0.0
