"""A model with fewer bits in the layers that were named: made beside the original, undone, saved and loaded."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import nn

from flatout.compression.quantising.calls import recorded
from flatout.compression.quantising.observers import Kind
from flatout.compression.quantising.others import torchao_quantization
from flatout.compression.quantising.schemes import LAYERS, Scheme, refusal, scheme_of
from flatout.compression.quantising.sites import owner, parents, place, read_by_parent
from flatout.errors import CheckpointError, RecordError, UsageError
from flatout.records.record import write_file

_FORMAT = 1
_DAMAGED = (RuntimeError, KeyError, TypeError, ValueError, EOFError, pickle.UnpicklingError)


class Quantised:
    """A copy of a model, some of its layers with fewer bits; the model itself is as it was.

    Calling it calls `module`. `schemes` names what was replaced, `left` says why other layers were not.
    """

    def __init__(
        self, module: nn.Module, schemes: Mapping[str, str], *, floats: Mapping[str, nn.Module], left: Mapping[str, str]
    ) -> None:
        self.module, self.schemes, self.left = module, dict(schemes), dict(left)
        self._floats = dict(floats)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def undo(self) -> nn.Module:
        """Put the layers back as they were, bit for bit, and return the module; they are copies of the model's as it is now."""
        for path, layer in self._floats.items():
            self.module = place(self.module, path, copy.deepcopy(layer))
        self._floats, self.schemes = {}, {}
        return self.module

    def save(self, path: Path | str) -> None:
        """Schemes and all tensors into one file, whole or not at all, for `load` beside a model of the same class."""
        # The state apart: torchao's tensors are read only after torchao is imported, which the schemes tell.
        state, whole = io.BytesIO(), io.BytesIO()
        torch.save(self.module.state_dict(), state)
        torch.save({"format": _FORMAT, "schemes": self.schemes, "state": state.getvalue()}, whole)
        try:
            write_file(Path(path), whole.getvalue())
        except RecordError as e:
            raise CheckpointError(str(e)) from e


def num_bytes(module: nn.Module) -> int:
    """Of parameters and buffers, those of torchao's tensors as they are packed; shared ones once."""
    seen: dict[int, int] = {}
    for tensor in (*module.parameters(), *module.buffers()):
        for part in _parts(tensor):
            seen[part.data_ptr() or id(part)] = part.numel() * part.element_size()
    return sum(seen.values())


def _parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The plain tensors that a tensor with a class of its own is made of."""
    flatten = getattr(type(tensor), "__tensor_flatten__", None)
    if flatten is None:
        return [tensor]
    names, _ = flatten(tensor)
    return [part for name in names for part in _parts(getattr(tensor, name))]


def quantise(
    model: nn.Module,
    scheme: str | Mapping[str, str],
    *,
    calibrate: Iterable[Any] | None = None,
    observer: Kind = "least-error",
) -> Quantised:
    """A copy of `model` whose layers are in `scheme`, or in that of the first pattern that fits their path ("blocks.*.out").

    `calibrate`: batches (a tensor, or a tuple of arguments) that schemes with a scale seen beforehand need; `observer` makes that
    scale of them. Layers that a scheme cannot have are left and told in `left`; UsageError when one that was named without a
    wildcard is refused, when a pattern fits no layer, and when nothing is replaced at all.
    """
    if model.training:
        raise UsageError(
            "the model is in training mode; call eval() first: few-bit layers are for inference (training: prepare_qat)"
        )
    wanted, left = named(model, {"*": scheme} if isinstance(scheme, str) else scheme)
    if not wanted:
        told = "; ".join(f"{path}: {why}" for path, why in list(left.items())[:5])
        raise UsageError(
            f"no layer of {type(model).__name__} can have {scheme}; {told or 'it has no layer of a kind that is known'}"
        )
    seen = _seen(model, [path for path, s in wanted.items() if s.is_calibrated], calibrate, observer)
    return replaced(model, wanted, seen=seen, left=left)


def replaced(
    model: nn.Module,
    wanted: Mapping[str, Scheme],
    *,
    seen: Mapping[str, Any] | None = None,
    left: Mapping[str, str] | None = None,
    made: Mapping[tuple[str, str], nn.Module] | None = None,
) -> Quantised:
    """The copy with these schemes; `made` layers, by path and scheme, are taken instead of made anew."""
    floats = {path: owner(model, path) for path in wanted}
    # Layers to replace are not copied: the copy holds the model's own until its own take their place.
    module = copy.deepcopy(model, {id(layer): layer for layer in floats.values()})
    for path, scheme in wanted.items():
        layer = (made or {}).get((path, scheme.name))
        if layer is None:
            layer = scheme.make(floats[path], (seen or {}).get(path)).train(floats[path].training)
        module = place(module, path, layer)
    names = {path: scheme.name for path, scheme in wanted.items()}
    return Quantised(module, names, floats=floats, left=left or {})


def load(path: Path | str, *, model: nn.Module) -> Quantised:
    """What `save` wrote, beside `model`: of the same class and sizes, its numbers do not matter and stay as they are.

    `undo` then gives this model's layers. CheckpointError for a file that is damaged or of another model.
    """
    try:
        held = torch.load(path, weights_only=True)
        if held["format"] != _FORMAT:
            raise CheckpointError(f"'{path}' has format {held['format']}, this version reads {_FORMAT}; save it anew")
        schemes = dict(held["schemes"])
        if any("torchao" in name for name in schemes.values()):
            torchao_quantization()
        state = torch.load(io.BytesIO(held["state"]), weights_only=True)
        found = replaced(model, {at: scheme_of(name) for at, name in schemes.items()}, seen=dict.fromkeys(schemes))
        found.module.load_state_dict(state, assign=True)
    except OSError as e:
        raise CheckpointError(f"cannot read '{path}': {e.strerror or e}; give the file that save wrote") from e
    except (*_DAMAGED, UsageError) as e:
        raise CheckpointError(
            f"'{path}' does not fit {type(model).__name__}: {e}; give the model that it was made of"
        ) from e
    return found


def named(model: nn.Module, patterns: Mapping[str, str]) -> tuple[dict[str, Scheme], dict[str, str]]:
    """Each layer's scheme by the first pattern that fits its path, and why other layers of known kinds have none."""
    wanted: dict[str, Scheme] = {}
    left: dict[str, str] = {}
    used = dict.fromkeys(patterns, False)
    inside = parents(model)
    for path, layer in model.named_modules():
        if type(layer) not in LAYERS:
            continue
        pattern = next((p for p in patterns if fnmatchcase(path, p)), None)
        if pattern is None:
            left[path] = "no pattern fits it"
            continue
        used[pattern] = True
        scheme = scheme_of(patterns[pattern])
        why = read_by_parent(path, inside) or refusal(scheme, layer)
        if why is None:
            wanted[path] = scheme
        elif pattern == path:
            raise UsageError(f"layer '{path}' cannot have '{scheme.name}': {why}")
        else:
            left[path] = f"{scheme.name}: {why}"
    missed = [p for p, was in used.items() if not was and p != "*"]
    if missed:
        raise UsageError(f"patterns {missed} fit no layer; layers are {', '.join(left | dict.fromkeys(wanted, ''))}")
    return wanted, left


def _seen(model: nn.Module, paths: list[str], batches: Iterable[Any] | None, kind: Kind) -> dict[str, Any]:
    if not paths:
        return {}
    if batches is None:
        raise UsageError(f"layers {paths[:5]} get a scale seen beforehand; give batches to calibrate=")
    return recorded(model, paths, batches, kind=kind)
