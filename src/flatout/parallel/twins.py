"""Weights that two stages of a pipeline share (an embedding that is the output layer, too): their gradients are added up."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from flatout.parallel.meshes import Meshes
from flatout.parallel.roles import Watched
from flatout.records.scale import FOLDED, Layout


class Twins:
    """The parameters that the first and the last stage both hold, here.

    Where both stages lie on one rank, the last gets a copy.
    """

    def __init__(
        self, model: nn.Module, watched: Watched, blocks: Sequence[str], layout: Layout, meshes: Meshes
    ) -> None:
        self._names = tied_over(model, watched, blocks)
        self._last = layout.pipeline * layout.parts_per_stage - 1
        self._is_here = layout.schedule in FOLDED
        self._pairs: list[tuple[nn.Parameter, nn.Parameter]] = []
        self._mine: list[nn.Parameter] = []
        self._group: dist.ProcessGroup | None = None
        self._is_second = meshes.stage == layout.pipeline - 1
        if self._names and not self._is_here:
            self._group = _ends(layout, meshes)

    def separate(self, part: nn.Module, number: int) -> None:
        """Before a part is divided: the last one, on a rank that holds the first too, gets parameters of its own."""
        if not (self._is_here and number == self._last):
            return
        made: dict[int, nn.Parameter] = {}
        for module in part.modules():
            for name, parameter in list(module._parameters.items()):
                if parameter is not None:
                    copied = made.setdefault(
                        id(parameter), nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
                    )
                    module.register_parameter(name, copied)

    def made(self, modules: Sequence[nn.Module]) -> Twins | None:
        """Once stages are divided and sharded. None where nothing is shared."""
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
        """Of both, for both."""
        for first, last in self._pairs:
            assert first.grad is not None and last.grad is not None
            first.grad += last.grad
            last.grad.copy_(first.grad)
        for parameter in self._mine:
            assert parameter.grad is not None
            gradient = parameter.grad
            dist.all_reduce(gradient.to_local() if isinstance(gradient, DTensor) else gradient, group=self._group)


def tied_over(model: nn.Module, watched: Watched, blocks: Sequence[str]) -> list[list[str]]:
    """Names of each parameter that is used both before the first block and after the last."""
    order = [call.path for call in watched.calls]
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


def _ends(layout: Layout, meshes: Meshes) -> dist.ProcessGroup | None:
    """This rank's group of the first and the last stage; all ranks make all groups."""
    rows = layout.num_devices // layout.pipeline
    mine = None
    for place in range(rows):
        ranks = [place, place + (layout.pipeline - 1) * rows]
        group = dist.new_group(ranks)
        if dist.get_rank() in ranks:
            mine = group
    return mine
