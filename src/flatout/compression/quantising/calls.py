"""What layers of a model are called with: kept for measuring them alone, or seen by observers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from flatout.compression.quantising.affine import Affine, for_range
from flatout.compression.quantising.observers import Kind, observer
from flatout.errors import UsageError

MOST_KEPT = 8
"""Calls of a layer whose inputs are kept: a cell is called once a step, and its steps are alike."""


class Call(NamedTuple):
    """Arguments of one call, detached copies."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def run(self, layer: nn.Module) -> Any:
        """The layer's outputs."""
        return layer(*self.args, **self.kwargs)


class Calls(NamedTuple):
    """The first calls of a layer in one call of the model, and how many there were."""

    kept: list[Call]
    num: int

    def run(self, layer: nn.Module) -> None:
        """All that were kept."""
        for call in self.kept:
            layer(*call.args, **call.kwargs)


def calls_of(model: nn.Module, paths: Sequence[str], inputs: Sequence[Any]) -> dict[str, Calls]:
    """Calls of the layers at `paths` while `model` works on `inputs`; layers that were not called are not in it."""
    kept: dict[str, list[Call]] = {path: [] for path in paths}
    counts = dict.fromkeys(paths, 0)

    def keep(path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        counts[path] += 1
        if len(kept[path]) < MOST_KEPT:
            kept[path].append(Call(*pytree.tree_map_only(Tensor, lambda t: t.detach().clone(), (args, kwargs))))

    with _watched(model, paths, keep), torch.inference_mode():
        model(*inputs)
    return {path: Calls(kept[path], num) for path, num in counts.items() if num}


def recorded(model: nn.Module, paths: Sequence[str], batches: Iterable[Any], *, kind: Kind) -> dict[str, Affine]:
    """The transformation of each layer's inputs, as the observer of this kind has it after all batches."""
    seeing = {path: observer(kind, bits=8, symmetric=False) for path in paths}

    def see(path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        first = next((x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)), None)
        if first is not None:
            seeing[path].see(first)

    with _watched(model, paths, see), torch.inference_mode():
        for batch in batches:
            model(*(batch if isinstance(batch, tuple | list) else (batch,)))
    found = {}
    for path, by in seeing.items():
        try:
            found[path] = for_range(*by.range(), symmetric=False)
        except UsageError as e:
            raise UsageError(f"layer '{path}' cannot be calibrated: {e}") from e
    return found


@contextmanager
def _watched(
    model: nn.Module, paths: Sequence[str], told: Callable[[str, tuple[Any, ...], dict[str, Any]], None]
) -> Iterator[None]:
    """Tell the calls of these layers; their hooks are gone afterwards."""
    handles = []
    for path in paths:

        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], path: str = path) -> None:
            told(path, args, kwargs)

        handles.append(model.get_submodule(path).register_forward_pre_hook(hook, with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def floats(outputs: Any) -> list[Tensor]:
    """The floating-point tensors among outputs, in float64."""
    return [t.double() for t in pytree.tree_leaves(outputs) if isinstance(t, Tensor) and t.is_floating_point()]


def in_float64(model: nn.Module, inputs: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Outputs of a float64 copy."""
    exact = copy.deepcopy(model).double()
    args, named = pytree.tree_map_only(
        Tensor, lambda t: t.double() if t.is_floating_point() else t, (tuple(inputs), dict(kwargs))
    )
    with torch.no_grad():
        return floats(exact(*args, **named))


def distance(outputs: Any, exact: Sequence[Tensor]) -> float:
    """The largest distance among the outputs, each over its own norm; infinite where one holds NaN or another shape."""
    worst = 0.0
    for found, wanted in zip(floats(outputs), exact, strict=True):
        norm = float(wanted.norm())
        off = float((found - wanted).norm()) if found.shape == wanted.shape else float("nan")
        worst = max(worst, off / norm if norm > 0 else off) if off == off else float("inf")
    return worst
