"""Parts of a plain model for the stages of a pipeline: the whole forward runs, and what other stages hold is asleep.

A stage is the model itself with the blocks of other stages taken out. Its forward is the model's own: what comes before its
blocks runs without data of embeddings, the first block it holds gets what the stage before sent, and after its last block the
forward ends. So the names of parameters, the code of blocks and whatever the forward hands to them (masks, positions) stay as
they are.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from flatout.errors import PlanError
from flatout.parallel.roles import Watched


class _Ended(Exception):
    """The last block of a stage has run: an end and no error."""

    def __init__(self, out: Tensor) -> None:
        super().__init__()
        self.out = out


class Asleep(nn.Module):
    """In place of a module of another stage: gives what is never looked at, of the right shape, or passes its input on."""

    def __init__(self, path: str, shape: torch.Size | None, dtype: torch.dtype | None) -> None:
        super().__init__()
        self._path, self._shape, self._dtype = path, shape, dtype

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The first input, or zeros."""
        if self._shape is None:
            return args[0]
        device = next(a.device for a in args if isinstance(a, Tensor))
        return torch.zeros(self._shape, dtype=self._dtype, device=device)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            raise AttributeError(
                f"'{self._path}' is on another stage of the pipeline, and the forward asks for its '{name}' here"
            ) from None


class Stage(nn.Module):
    """One part of a model. Stages but the first are called with what came before; all with the model's inputs besides.

    The last stage gives the model's output, others what the next is called with.
    """

    def __init__(self, model: nn.Module, blocks: Sequence[str], *, is_first: bool, is_last: bool) -> None:
        super().__init__()
        self.model = model
        self._is_first, self._is_last = is_first, is_last
        self._given: Tensor | None = None
        if not is_first:
            model.get_submodule(blocks[0]).register_forward_pre_hook(self._enter, with_kwargs=True)
        if not is_last:
            model.get_submodule(blocks[-1]).register_forward_hook(self._leave)

    def forward(self, given: Tensor | None, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """`given` by the stage before."""
        self._given = given
        try:
            return self.model(*args, **kwargs)
        except _Ended as ended:
            return ended.out
        finally:
            self._given = None

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        if self._given is None:
            return args, kwargs  # recomputed in the backward
        given, self._given = self._given, None
        return (given, *args[1:]), kwargs

    def _leave(self, module: nn.Module, args: Any, out: Any) -> None:
        raise _Ended(out)


def part_of(model: nn.Module, watched: Watched, blocks: Sequence[str], mine: Sequence[str]) -> nn.Module:
    """A copy of the model, sharing its parameters, that holds the blocks `mine` and what its first or last stage needs.

    Raises PlanError for blocks that give more than one tensor.
    """
    part = copy.deepcopy(model, {id(p): p for p in model.parameters()} | {id(b): b for b in model.buffers()})
    first, last = mine[0] == blocks[0], mine[-1] == blocks[-1]
    order = [call.path for call in watched.calls]
    begin = order.index(blocks[0])
    end = max(i for i, path in enumerate(order) if path == blocks[-1] or path.startswith(f"{blocks[-1]}."))
    inside = tuple(f"{block}." for block in blocks)
    for block in blocks:
        if not isinstance(watched.of(block)[0].out, Tensor):
            raise PlanError(f"block '{block}' gives more than one tensor; stages send one")
        if block not in mine:
            _put(part, block, Asleep(block, None, None))
    holders = {block.rpartition(".")[0] for block in blocks}
    around = {path for holder in holders for path in _prefixes(holder)}
    for path in dict.fromkeys(order):
        if path in blocks or path.startswith(inside) or path in around or not path:
            continue
        at = [i for i, other in enumerate(order) if other == path]
        is_unused = (not first and max(at) < begin) or (not last and min(at) > end)
        if is_unused and _is_there(part, path) and _has_parameters(part.get_submodule(path)):
            out = watched.of(path)[0].out
            if isinstance(out, Tensor):
                _put(part, path, Asleep(path, out.shape, out.dtype))
    return part


def _prefixes(path: str) -> list[str]:
    names = path.split(".")
    return [".".join(names[:n]) for n in range(1, len(names) + 1)]


def _is_there(model: nn.Module, path: str) -> bool:
    try:
        return not isinstance(model.get_submodule(path), Asleep)
    except AttributeError:
        return False


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _put(model: nn.Module, path: str, module: nn.Module) -> None:
    holder, _, name = path.rpartition(".")
    model.get_submodule(holder)._modules[name] = module


def shares(blocks: Sequence[str], num: int) -> list[list[str]]:
    """The blocks of each of `num` parts, as even as they can be, larger parts in the middle: the ends have embeddings and logits.

    >>> [len(part) for part in shares(list("abcdefghij"), 4)]
    [2, 3, 3, 2]
    """
    if num > len(blocks):
        raise PlanError(f"{len(blocks)} blocks cannot be divided into {num} parts; lower pipeline or chunks")
    each, more = divmod(len(blocks), num)
    middle = sorted(range(num), key=lambda i: abs(i - (num - 1) / 2))
    sizes = [each + (i in middle[:more]) for i in range(num)]
    found, at = [], 0
    for size in sizes:
        found.append(list(blocks[at : at + size]))
        at += size
    return found
