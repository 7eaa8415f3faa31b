"""Parts of a plain model for the stages of a pipeline: the whole forward runs, and modules of other stages are replaced.

A stage is the model itself with the blocks of other stages taken out. Its forward is the model's own: what comes before its
blocks runs without data of embeddings, the first block it holds gets what the stage before sent, and after its last block the
forward ends. So the names of parameters, the code of blocks and whatever the forward hands to them (masks, positions) stay as
they are.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from flatout.blocks.parallel.roles import ObservedForward
from flatout.blocks.parallel.world import Meshes
from flatout.core.errors import PlanError
from flatout.core.records.scale import FOLDED, Layout


class _Ended(Exception):
    """The last block of a stage has run: an end and no error."""

    def __init__(self, out: Tensor) -> None:
        super().__init__()
        self.out = out


class AbsentModule(nn.Module):
    """Stands for a module of another stage: returns zeros of its shape, which nobody reads, or its input."""

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


class ModelStage(nn.Module):
    """One part of a model. Stages but the first are called with what came before; all with the model's inputs besides.

    The last stage gives the model's output, others what the next is called with.
    """

    def __init__(self, model: nn.Module, blocks: Sequence[str], *, is_first: bool, is_last: bool) -> None:
        super().__init__()
        self.model = model
        self.is_first, self.is_last = is_first, is_last
        self._hidden: Tensor | None = None
        if not is_first:
            model.get_submodule(blocks[0]).register_forward_pre_hook(self._enter, with_kwargs=True)
        if not is_last:
            model.get_submodule(blocks[-1]).register_forward_hook(self._leave)

    def forward(self, hidden: Tensor | None, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The output of this stage for the hidden state that the stage before has sent."""
        self._hidden = hidden
        try:
            return self.model(*args, **kwargs)
        except _Ended as ended:
            return ended.out
        finally:
            self._hidden = None

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        if self._hidden is None:
            return args, kwargs  # recomputed in the backward
        hidden, self._hidden = self._hidden, None
        return (hidden, *args[1:]), kwargs

    def _leave(self, module: nn.Module, args: Any, out: Any) -> None:
        raise _Ended(out)


def stage_model(model: nn.Module, observed: ObservedForward, blocks: Sequence[str], mine: Sequence[str]) -> nn.Module:
    """A copy of the model, sharing its parameters, that holds the blocks `mine` and what its first or last stage needs.

    Raises PlanError for blocks that give more than one tensor.
    """
    part = copy.deepcopy(model, {id(p): p for p in model.parameters()} | {id(b): b for b in model.buffers()})
    first, last = mine[0] == blocks[0], mine[-1] == blocks[-1]
    order = [call.path for call in observed.calls]
    begin = order.index(blocks[0])
    end = max(i for i, path in enumerate(order) if path == blocks[-1] or path.startswith(f"{blocks[-1]}."))
    inside = tuple(f"{block}." for block in blocks)
    for block in blocks:
        if not isinstance(observed.of(block)[0].out, Tensor):
            raise PlanError(f"block '{block}' gives more than one tensor; stages send one")
        if block not in mine:
            _put(part, block, AbsentModule(block, None, None))
    holders = {block.rpartition(".")[0] for block in blocks}
    around = {
        ".".join(names[:n]) for names in (holder.split(".") for holder in holders) for n in range(1, len(names) + 1)
    }
    for path in dict.fromkeys(order):
        if path in blocks or path.startswith(inside) or path in around or not path:
            continue
        at = [i for i, other in enumerate(order) if other == path]
        is_unused = (not first and max(at) < begin) or (not last and min(at) > end)
        out = observed.of(path)[0].out
        if is_unused and isinstance(out, Tensor) and _has_weights(part, path):
            _put(part, path, AbsentModule(path, out.shape, out.dtype))
    return part


def _has_weights(model: nn.Module, path: str) -> bool:
    """Whether there is a module with parameters; an absent one has none."""
    try:
        return next(model.get_submodule(path).parameters(), None) is not None
    except AttributeError:
        return False


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
    rest = iter(blocks)
    return [list(islice(rest, size)) for size in sizes]


# -- weights that two stages share (an embedding that is the output layer, too): their gradients are added up ---------------


class TiedWeights:
    """The parameters that the first and the last stage both hold, here.

    Where both stages lie on one rank, the last gets a copy.
    """

    def __init__(
        self, model: nn.Module, observed: ObservedForward, blocks: Sequence[str], layout: Layout, meshes: Meshes
    ) -> None:
        self._names = _tied_over(model, observed, blocks)
        self._last = layout.pipeline * layout.parts_per_stage - 1
        self._is_here = layout.schedule in FOLDED
        self._pairs: list[tuple[nn.Parameter, nn.Parameter]] = []
        self._mine: list[nn.Parameter] = []
        self._group = _ends(layout) if self._names and not self._is_here else None
        self._is_second = meshes.stage == layout.pipeline - 1

    def separate(self, part: nn.Module, number: int) -> None:
        """Give the last part parameters of its own on a rank that holds the first too; call it before a part is divided."""
        if not (self._is_here and number == self._last):
            return
        copies = {id(p): nn.Parameter(p.detach().clone(), p.requires_grad) for p in part.parameters()}
        for module in part.modules():
            for name, parameter in list(module._parameters.items()):
                if parameter is not None:
                    module.register_parameter(name, copies[id(parameter)])

    def found_in(self, modules: Sequence[nn.Module]) -> TiedWeights | None:
        """Find the shared weights in stages that are divided and sharded; None where nothing is shared."""
        if not self._names:
            return None
        found: list[list[nn.Parameter]] = []
        for module in modules:
            by_name = {n.removeprefix("stage.model."): p for n, p in module.named_parameters(remove_duplicate=False)}
            found.append([next((by_name[n] for n in names if n in by_name), None) for names in self._names])  # type: ignore[misc]
        if self._is_here:
            self._pairs = [(a, b) for a, b in zip(found[0], found[-1], strict=True) if a is not None and b is not None]
        elif self._group is not None:
            row = found[-1] if self._is_second else found[0]
            self._mine = [p for p in row if p is not None]
        return self

    def counted_elsewhere(self) -> frozenset[int]:
        """Identities of the parameters here that the first stage's rank counts."""
        if self._is_here:
            return frozenset(id(b) for _, b in self._pairs)
        return frozenset(id(p) for p in self._mine) if self._is_second else frozenset()

    def sum_gradients(self) -> None:
        """Add the gradients of both stages, and give both the sum."""
        for first, last in self._pairs:
            assert first.grad is not None and last.grad is not None
            first.grad += last.grad
            last.grad.copy_(first.grad)
        for parameter in self._mine:
            assert parameter.grad is not None
            gradient = parameter.grad
            dist.all_reduce(gradient.to_local() if isinstance(gradient, DTensor) else gradient, group=self._group)


def _tied_over(model: nn.Module, observed: ObservedForward, blocks: Sequence[str]) -> list[list[str]]:
    """Names of each parameter that is used both before the first block and after the last."""
    order = [call.path for call in observed.calls]
    begin, end = order.index(blocks[0]), max(i for i, path in enumerate(order) if path == blocks[-1])
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    found = []
    for group in names.values():
        holders = [name.rpartition(".")[0] for name in group]
        at = [i for i, path in enumerate(order) if path in holders]
        if len(group) > 1 and any(i < begin for i in at) and any(i > end for i in at):
            found.append(group)
    return found


def _ends(layout: Layout) -> dist.ProcessGroup | None:
    """This rank's group of the first and the last stage; all ranks make all groups."""
    rows = layout.num_devices // layout.pipeline
    pairs = [[place, place + (layout.pipeline - 1) * rows] for place in range(rows)]
    mine: dist.ProcessGroup | None = dist.new_subgroups_by_enumeration(pairs)[0]
    return mine
