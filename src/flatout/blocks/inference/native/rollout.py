"""A module run event by event as a program would run it: random inputs of the example's shapes, carried state fed back."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from flatout.core.errors import NativeError, UsageError
from flatout.core.tensors import nests as pytree

Events = list[tuple[Tensor, ...]]
"""Inputs of each event, without what is carried."""
_INDEX_TYPES: Final = (torch.int64, torch.int32)


class Places(NamedTuple):
    """Where the tensors of a forward's arguments come from, and how they are put together."""

    names: tuple[str, ...]
    """Of all tensors of the example, in order: the parameter, and a number where it holds several."""
    carried: tuple[int, ...]
    """Positions of state, in the order in which their new values end the outputs."""
    spec: pytree.TreeSpec

    @property
    def inputs(self) -> tuple[int, ...]:
        """The positions of inputs that are not carried state."""
        return tuple(at for at in range(len(self.names)) if at not in self.carried)

    def arguments(self, inputs: Sequence[Tensor], state: Sequence[Tensor]) -> tuple[Any, ...]:
        """The arguments of forward, inputs and state each in its place."""
        by_place = dict(zip(self.carried, state, strict=True)) | dict(zip(self.inputs, inputs, strict=True))
        arguments = pytree.tree_unflatten([by_place[at] for at in range(len(self.names))], self.spec)
        return tuple(arguments)


def input_places(module: nn.Module, example_inputs: Sequence[Any], state: str | Sequence[str]) -> Places:
    """Raises UsageError where an example holds no tensor, or a name of `state` is no parameter of forward."""
    parameters = _parameters(module, len(example_inputs))
    wanted = (state,) if isinstance(state, str) else tuple(state)
    unknown = [name for name in wanted if name not in parameters]
    if unknown:
        raise UsageError(
            f"state '{unknown[0]}' is no parameter of {type(module).__name__}.forward that the example fills; it has "
            f"{', '.join(parameters)}"
        )
    names: list[str] = []
    carried: list[int] = []
    for parameter, example in zip(parameters, example_inputs, strict=True):
        leaves = pytree.tree_leaves(example)
        for at, leaf in enumerate(leaves):
            if not isinstance(leaf, Tensor):
                raise UsageError(f"'{parameter}' holds a {type(leaf).__name__} in the example; engines take tensors")
            if parameter in wanted:
                carried.append(len(names))
            names.append(parameter if leaf is example else f"{parameter}_{at}")
    return Places(tuple(names), tuple(carried), pytree.tree_structure(tuple(example_inputs)))


def tensors_of(example_inputs: Sequence[Any]) -> tuple[Tensor, ...]:
    """The example tensors in the order of `Places.names`, each in memory of its own and in C order."""
    return tuple(leaf.detach().contiguous().clone() for leaf in pytree.tree_leaves(tuple(example_inputs)))


def _parameters(module: nn.Module, num_examples: int) -> tuple[str, ...]:
    found: list[str] = []
    for parameter in inspect.signature(module.forward).parameters.values():
        if parameter.kind is parameter.VAR_POSITIONAL:
            found += [f"{parameter.name}_{at}" for at in range(num_examples - len(found))]
        elif parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            found.append(parameter.name)
    if num_examples > len(found):
        raise UsageError(f"{num_examples} example inputs for {type(module).__name__}.forward, which takes {len(found)}")
    return tuple(found[:num_examples])


def random_events(module: nn.Module, tensors: Sequence[Tensor], where: Places, *, num_events: int, seed: int) -> Events:
    """Standard-normal numbers; indices that every embedding of the module has, or numbers of the example where it has none."""
    generator = torch.Generator().manual_seed(seed)
    sizes = [m.num_embeddings for m in module.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag))]
    examples = [tensors[at] for at in where.inputs]
    return [tuple(_like(example, min(sizes, default=0), generator) for example in examples) for _ in range(num_events)]


def _like(example: Tensor, num_rows: int, generator: torch.Generator) -> Tensor:
    if example.is_floating_point():
        return torch.randn(example.shape, generator=generator).to(example.dtype)
    if example.dtype is torch.bool:
        return torch.rand(example.shape, generator=generator) < 0.5
    if example.dtype in _INDEX_TYPES and num_rows:
        return torch.randint(num_rows, example.shape, generator=generator, dtype=example.dtype)
    if not example.numel():
        return example.clone()
    picked = torch.randint(example.numel(), example.shape, generator=generator)
    return example.reshape(-1)[picked]


def run(
    module: nn.Module, events: Events, where: Places, *, dtype: torch.dtype, start: Sequence[Tensor]
) -> list[list[Tensor]]:
    """Outputs of each event, without the carried ones, of a copy of the module in `dtype` and eval mode; `start` is the state
    at first. Buffers that forward changes are carried by the copy."""
    copied = copy.deepcopy(module).to(dtype).eval()
    state, found = [_as(tensor, dtype) for tensor in start], []
    with torch.no_grad(), _default(dtype):
        for inputs in events:
            outputs = output_tensors(copied(*where.arguments([_as(tensor, dtype) for tensor in inputs], state)))
            split = num_plain(outputs, len(state), module)
            # cloned: a forward may return its own buffers or its arguments
            outputs = [tensor.clone() for tensor in outputs]
            state = outputs[split:]
            found.append(outputs[:split])
    return found


def num_plain(outputs: Sequence[Tensor], num_carried: int, module: nn.Module) -> int:
    """Outputs that are no state. Raises NativeError where there is none."""
    if len(outputs) <= num_carried:
        raise NativeError(
            f"{type(module).__name__}.forward gives {len(outputs)} tensors, of which the last {num_carried} are the new state; "
            "an engine needs one more at least, its output"
        )
    return len(outputs) - num_carried


@contextmanager
def _default(dtype: torch.dtype) -> Iterator[None]:
    """For what a forward makes itself, as with torch.zeros."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def output_tensors(outputs: object) -> list[Tensor]:
    """The tensors of what forward returned, in the order in which torch.export lists them."""
    return [leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, Tensor)]


def _as(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor.clone()


def largest_errors(found: Sequence[Sequence[Tensor]], exact: Sequence[Sequence[Tensor]]) -> list[float]:
    """The error of each output over all events: the largest difference over the largest number of `exact`.

    It is inf where a number is not finite. Both arguments are events of outputs.
    """
    errors = []
    for ours, right in zip(zip(*found, strict=True), zip(*exact, strict=True), strict=True):
        left, true = torch.stack(list(ours)).double(), torch.stack(list(right)).double()
        difference = float((left - true).abs().max()) if left.numel() else 0.0
        largest = float(true.abs().max()) if true.numel() else 0.0
        errors.append(difference / largest if largest else difference)
    return [float("inf") if error != error else error for error in errors]
