"""An adapter alone as a file: its tensors as safetensors, what it is in the file's metadata; nothing is ever unpickled."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from flatout.core.errors import CheckpointError, RecordError
from flatout.core.records.adapt import Lora, Trained
from flatout.core.records.record import from_json
from flatout.shrink.adapt.attachment import plain_modules, plain_parameters
from flatout.shrink.checkpoint_file import write_checkpoint_file

_KEY: Final = "flatout_adapter"


def write_adapter(path: Path, trained: Trained, tensors: Mapping[str, Tensor]) -> None:
    """Whole or not at all: written beside the place, then renamed.

    Raises CheckpointError where the folder does not exist or cannot be written.
    """
    metadata = {_KEY: msgspec.json.encode(trained).decode()}
    write_checkpoint_file(path, save({name: t.detach().cpu().contiguous() for name, t in tensors.items()}, metadata))


def read_adapter(path: Path) -> tuple[Trained, dict[str, Tensor]]:
    """Read the adapter that `write_adapter` wrote to a file.

    Raises CheckpointError where the file is missing, damaged, or holds something else.
    """
    metadata, tensors = read_tensors(path)
    if _KEY not in metadata:
        raise CheckpointError(f"'{path}' is no adapter of flatout; a folder of PEFT is read by load_peft")
    try:
        trained = from_json(metadata[_KEY], Trained)
    except RecordError as e:
        raise CheckpointError(f"'{path}': {e}") from e
    _check_sizes(trained, tensors, path)
    return trained, tensors


def _check_sizes(trained: Trained, tensors: Mapping[str, Tensor], path: Path) -> None:
    """Raises CheckpointError for a size that no tensor of the file has: nothing is allocated for a mere claim."""
    sizes = {size for tensor in tensors.values() for size in tensor.shape}
    method = trained.method
    for name in ("rank", "width", "num_vectors"):
        for claimed in (getattr(method, name, None), trained.rank if name == "rank" else None):
            if claimed is not None and claimed not in sizes - {0}:
                raise CheckpointError(f"'{path}' has the {name} {claimed}, and no tensor of that size; it is damaged")


def read_tensors(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    if not os.path.isfile(path):
        raise CheckpointError(f"there is no file '{path}'")
    try:
        with safe_open(path, framework="pt") as file:
            return file.metadata() or {}, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as e:
        raise CheckpointError(f"'{path}' is damaged: {e}") from e


def check_fits_model(model: nn.Module, saved: Trained, tensors: Mapping[str, Tensor], path: Path) -> None:
    """Raise CheckpointError where the model lacks a place that the adapter was at."""
    modules = {p for p, _ in plain_modules(model)} | {p for p, _ in plain_parameters(model)}
    for host in saved.hosts:
        place = host.partition("/")[0]
        if place not in modules:
            raise CheckpointError(f"'{path}' adapts '{place}', which this model does not have")
        if isinstance(saved.method, Lora) and f"{place}.low_rank.{host.partition('/')[2]}.a".lstrip(".") not in tensors:
            raise CheckpointError(f"'{path}' lacks the pair of '{place}'")


@torch.no_grad()
def copy_into(tensors: Mapping[str, Tensor], into: Mapping[str, Tensor], *, required: set[str], path: Path) -> None:
    """Raise CheckpointError, before anything is copied, for tensors that are missing, unknown or of another shape."""
    missing, unknown = sorted(required - set(tensors)), sorted(set(tensors) - set(into))
    if missing or unknown:
        difference = (
            f"lacks {', '.join(missing[:4])}"
            if missing
            else f"holds {', '.join(unknown[:4])}, which the model does not have"
        )
        raise CheckpointError(f"'{path}' {difference}; it belongs to another model")
    for name, tensor in tensors.items():
        if tensor.shape != into[name].shape:
            raise CheckpointError(
                f"'{path}' holds '{name}' of {list(tensor.shape)}, the model's is {list(into[name].shape)}; it belongs to another"
            )
    for name, tensor in tensors.items():
        into[name].copy_(tensor)
