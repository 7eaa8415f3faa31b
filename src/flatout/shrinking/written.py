"""A chosen model in a folder, and out of it again."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn
from torch.utils._pytree import tree_map

from flatout.errors import CheckpointError, UsageError
from flatout.levers.subjects import Purpose, Subject
from flatout.records.lever import Offer
from flatout.records.record import Record, from_json, to_json, write_file
from flatout.registry import lever_of

MODEL: Final = "model.pt"
HOW: Final = "how.json"


class How(Record, frozen=True, kw_only=True):
    """What was done to a model, lever by lever: the first `num_held` are in its weights, the others are pulled on loading."""

    version: int = 1
    composition: tuple[Offer, ...]
    num_held: int
    torch: str


def write(subject: Subject, composition: tuple[Offer, ...], folder: Path) -> None:
    """`model.pt` (the module, pickled, with example inputs) and `how.json`, whole or not at all.

    Raises UsageError when the module cannot be pickled, or the folder cannot be written.
    """
    num_held = sum(_is_held(offer) for offer in composition)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".model", delete=False) as file:
            inputs = tree_map(_alone, subject.inputs)
            held = {"model": subject.model, "inputs": inputs, "num_state": subject.purpose.num_state}
            torch.save(held, file)
        Path(file.name).replace(folder / MODEL)
    except OSError as e:
        raise UsageError(f"cannot write '{folder}': {e.strerror or e}; give a folder that can be written") from e
    except (AttributeError, TypeError) as e:  # what pickle raises for classes inside of functions
        raise UsageError(f"the model cannot be pickled: {e}; define its classes at the top of a module") from e
    how = How(composition=composition, num_held=num_held, torch=str(torch.__version__))
    write_file(folder / HOW, to_json(how))


def load_shrunk(folder: str | Path) -> Callable[..., Any]:
    """What `flatout shrink -o` wrote: called as the model is (with a state: `Stepping`, which carries it);
    what runs it (compiled, native) is made anew here.

    The folder holds a pickled module: load only what you wrote yourself. Raises CheckpointError when a file is missing or torn.
    """
    folder = Path(folder)
    try:
        how = from_json((folder / HOW).read_bytes(), How)
        held = torch.load(folder / MODEL, weights_only=False)
    except OSError as e:
        raise CheckpointError(f"'{folder}' holds no model of flatout shrink: {e.strerror or e}") from e
    except (RuntimeError, EOFError) as e:
        raise CheckpointError(f"'{folder / MODEL}' cannot be read: {e}; write it anew with flatout shrink") from e
    model: nn.Module = held["model"]
    purpose = Purpose(inputs=held["inputs"], num_state=held["num_state"], evaluate=_nothing)
    subject = Subject.of(model, purpose)
    for offer in how.composition[how.num_held :]:
        reduction = lever_of(offer.lever).reduction
        if reduction is None:
            raise CheckpointError(f"'{folder / HOW}' names lever '{offer.lever}', which makes no model cheaper")
        subject = reduction.apply(subject, offer.parameters)
    return subject.usable


def _alone(value: Any) -> Any:
    """A tensor without what else lies in its storage."""
    return value.clone() if isinstance(value, torch.Tensor) else value


def _is_held(offer: Offer) -> bool:
    reduction = lever_of(offer.lever).reduction
    return reduction is not None and reduction.kind != "engine"


def _nothing(call: Callable[..., Any]) -> float:
    return 0.0
