"""A model with fewer bits in the layers that were named: made beside the original, undone, saved and loaded."""

from __future__ import annotations

import copy
import io
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import nn

from flatout.core.errors import CheckpointError, UsageError
from flatout.core.tensors.saved import load_saved_tensors
from flatout.shrink.checkpoint_file import write_checkpoint_file
from flatout.shrink.quantise.observers import Kind, calibrated_inputs
from flatout.shrink.quantise.schemes import LAYERS, Scheme, refusal, scheme_of
from flatout.shrink.quantise.torch_layers import torchao_quantization

_READERS = (nn.MultiheadAttention, nn.TransformerEncoderLayer)
"""They hand their layers' weights to one operator instead of calling the layers, in some modes or all."""
_FORMAT = 1
_DAMAGED = (RuntimeError, KeyError, TypeError, ValueError, AttributeError)


@dataclass(eq=False)
class Quantised:
    """A copy of a model, some of its layers with fewer bits; the model itself is as it was.

    Calling it calls `module`. `schemes` names what was replaced, `unchanged` says why other layers were not.
    """

    module: nn.Module
    schemes: dict[str, str]
    original_layers: dict[str, nn.Module] = field(default_factory=dict)
    unchanged: Mapping[str, str] = field(default_factory=dict)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def undo(self) -> nn.Module:
        """Put the layers back as they were, bit for bit, and return the module; they are copies of the model's as it is now."""
        for path, layer in self.original_layers.items():
            self.module = replace_layer(self.module, path, copy.deepcopy(layer))
        self.original_layers, self.schemes = {}, {}
        return self.module

    def save(self, path: Path | str) -> None:
        """Schemes and all tensors into one file, whole or not at all, for `load_quantised` beside a model of the same class."""
        # The state apart: torchao's tensors are read only after torchao is imported, which the schemes tell.
        state, whole = io.BytesIO(), io.BytesIO()
        torch.save(self.module.state_dict(), state)
        torch.save({"format": _FORMAT, "schemes": self.schemes, "state": state.getvalue()}, whole)
        write_checkpoint_file(Path(path), whole.getvalue())


def quantise(
    model: nn.Module,
    scheme: str | Mapping[str, str],
    *,
    calibrate: Iterable[Any] | None = None,
    observer: Kind = "least-error",
) -> Quantised:
    """A copy of `model` whose layers are in `scheme`, or in that of the first pattern that fits their path ("blocks.*.out").

    `calibrate`: batches (a tensor, or a tuple of arguments) that schemes with a scale seen beforehand need; `observer` makes that
    scale of them. Layers that a scheme cannot have stay, with the reason in `unchanged`; UsageError when one that was
    named without a wildcard is refused, when a pattern fits no layer, and when nothing is replaced at all.
    """
    if model.training:
        raise UsageError(
            "the model is in training mode; call eval() first: few-bit layers are for inference (training: prepare_qat)"
        )
    wanted, unchanged = named(model, {"*": scheme} if isinstance(scheme, str) else scheme)
    if not wanted:
        reasons = "; ".join(f"{path}: {why}" for path, why in list(unchanged.items())[:5])
        raise UsageError(
            f"no layer of {type(model).__name__} can have {scheme}; {reasons or 'it has no layer of a kind that is known'}"
        )
    input_ranges = _calibrated(model, [path for path, s in wanted.items() if s.is_calibrated], calibrate, observer)
    return replaced(model, wanted, input_ranges=input_ranges, unchanged=unchanged)


def replaced(
    model: nn.Module,
    wanted: Mapping[str, Scheme],
    *,
    input_ranges: Mapping[str, Any] | None = None,
    unchanged: Mapping[str, str] | None = None,
    layers: Mapping[tuple[str, str], nn.Module] | None = None,
) -> Quantised:
    """The copy with these schemes; `layers` layers, by path and scheme, are taken instead of built again."""
    original_layers = {path: layer_at(model, path) for path in wanted}
    # Layers to replace are not copied: the copy holds the model's own until its own take their place.
    module = copy.deepcopy(model, {id(layer): layer for layer in original_layers.values()})
    for path, scheme in wanted.items():
        layer = (layers or {}).get((path, scheme.name))
        if layer is None:
            layer = scheme.make(original_layers[path], (input_ranges or {}).get(path)).train(
                original_layers[path].training
            )
        module = replace_layer(module, path, layer)
    names = {path: scheme.name for path, scheme in wanted.items()}
    return Quantised(module, names, original_layers=original_layers, unchanged=unchanged or {})


def load_quantised(path: Path | str, *, model: nn.Module) -> Quantised:
    """What `save` wrote, beside `model`: of the same class and sizes, its numbers do not matter and stay as they are.

    `undo` then gives this model's layers. CheckpointError for a file that is damaged or of another model.
    """
    try:
        saved = load_saved_tensors(Path(path), name=str(path))
        if saved["format"] != _FORMAT:
            raise CheckpointError(f"'{path}' has format {saved['format']}, this version reads {_FORMAT}; save it anew")
        schemes = dict(saved["schemes"])
        if any("torchao" in name for name in schemes.values()):
            torchao_quantization()
        for at in schemes:
            if type(layer_at(model, at)) not in LAYERS:
                raise UsageError(f"'{at}' is no layer that can have fewer bits")
        state = load_saved_tensors(saved["state"], name=f"state of {path}")
        found = replaced(
            model, {at: scheme_of(name) for at, name in schemes.items()}, input_ranges=dict.fromkeys(schemes)
        )
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
    unchanged: dict[str, str] = {}
    used = dict.fromkeys(patterns, False)
    stay = read_by_parents(model)
    for path, layer in model.named_modules():
        if type(layer) not in LAYERS:
            continue
        pattern = next((p for p in patterns if fnmatchcase(path, p)), None)
        if pattern is None:
            unchanged[path] = "no pattern fits it"
            continue
        used[pattern] = True
        scheme = scheme_of(patterns[pattern])
        why = stay.get(path) or refusal(scheme, layer)
        if why is None:
            wanted[path] = scheme
        elif pattern == path:
            raise UsageError(f"layer '{path}' cannot have '{scheme.name}': {why}")
        else:
            unchanged[path] = f"{scheme.name}: {why}"
    missed = [p for p, was in used.items() if not was and p != "*"]
    if missed:
        raise UsageError(
            f"patterns {missed} fit no layer; layers are {', '.join(unchanged | dict.fromkeys(wanted, ''))}"
        )
    return wanted, unchanged


def _calibrated(model: nn.Module, paths: list[str], batches: Iterable[Any] | None, kind: Kind) -> dict[str, Any]:
    if not paths:
        return {}
    if batches is None:
        raise UsageError(f"layers {paths[:5]} get a scale seen beforehand; give batches to calibrate=")
    return calibrated_inputs(model, paths, batches, kind=kind)


def layer_at(model: nn.Module, path: str) -> nn.Module:
    """The module at a path; UsageError when there is none."""
    try:
        return model.get_submodule(path)
    except AttributeError as e:
        raise UsageError(f"{type(model).__name__} has no layer '{path}'; look at named_modules()") from e


def replace_layer(model: nn.Module, path: str, layer: nn.Module) -> nn.Module:
    """Put `layer` at `path` and wherever else the same module sits; returns the model, or `layer` for the model's own path."""
    old = layer_at(model, path)
    if old is model:
        return layer
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if child is old:
                parent._modules[name] = layer
    return model


def read_by_parents(model: nn.Module) -> dict[str, str]:
    """Why layers must stay whose parent takes their weights itself, by path."""
    found: dict[str, str] = {}
    for at, module in model.named_modules():
        if isinstance(module, _READERS):
            inside = dict(module.named_modules(prefix=at))
            found = dict.fromkeys(inside, f"{type(module).__name__} '{at}' reads its layers' weights itself") | found
    return found
