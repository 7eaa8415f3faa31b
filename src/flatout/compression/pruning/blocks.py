"""Whole blocks: which of them a model does without best, by trying each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from flatout.compression.pruning.cutting import apply_pruning
from flatout.compression.pruning.graph import flat_outputs, in_float64, to_float64
from flatout.compression.pruning.proof import TOLERANCE, distance
from flatout.compression.pruning.pruning import Loss, Pruned, amounts_of, work_flop
from flatout.errors import PlanError, UsageError
from flatout.records.pruning import DroppedBlock, PruningPlan, PruningReport

M = TypeVar("M", bound=nn.Module)


def drop_blocks(
    model: M,
    inputs: Sequence[Tensor],
    *,
    num: int = 1,
    batches: Sequence[object] = (),
    loss: Loss | None = None,
    keep: Sequence[str] = (),
) -> Pruned[M]:
    """A copy of `model` without `num` of its blocks; the model itself stays as it is.

    A block is an entry of a Sequential or ModuleList with parameters that gives a tensor of the shape that it got: mostly
    x + f(x), and x without it. They go one after the other, each time the one whose absence changes least: the loss where
    `batches` and `loss(model, batch)` are given, the outputs otherwise. The result gives what the original gives with these
    blocks as the identity, in float64.

    Raises UsageError when there are fewer such blocks, and PlanError where leaving them out is not the same as the identity.
    """
    if num < 1:
        raise UsageError(f"num {num} is not positive; give how many blocks go")
    own, given = in_float64(model), to_float64(inputs)
    before = _outputs(own, given)
    blocks = [path for path in candidates(own, given) if path not in keep]
    if len(blocks) < num:
        raise UsageError(
            f"{num} blocks are to go, {type(model).__name__} has {len(blocks)} that give the shape they got "
            f"({', '.join(blocks) or 'none'}); a block is an entry of a Sequential or ModuleList"
        )
    gone: list[str] = []
    effects: dict[str, float] = {}
    start = _loss(own, batches, loss)
    for _ in range(num):
        found = {}
        for path in blocks:
            if path not in gone:
                with _Skipped(own, [*gone, path]):
                    is_loss = loss is not None
                    found[path] = (
                        _loss(own, batches, loss) - start if is_loss else distance(_outputs(own, given), before)
                    )
        effects |= found
        gone.append(min(found, key=lambda path: found[path]))
    return _proved(model, own, inputs, gone, effects)


def candidates(model: nn.Module, inputs: Sequence[Tensor]) -> list[str]:
    """Paths of the blocks that give the shape they got, in this call."""
    fits: dict[str, bool] = {}
    handles = []
    for path, module in model.named_modules():
        parent = model.get_submodule(path.rpartition(".")[0])
        if path and isinstance(parent, (nn.Sequential, nn.ModuleList)) and any(True for _ in module.parameters()):
            handles.append(module.register_forward_hook(_seen(path, fits)))
    try:
        _outputs(model, inputs)
    finally:
        for handle in handles:
            handle.remove()
    return [path for path, is_alike in fits.items() if is_alike]


def _seen(path: str, fits: dict[str, bool]) -> Any:
    def look(_: nn.Module, args: tuple[object, ...], output: object) -> None:
        first = args[0] if args else None
        is_alike = isinstance(first, Tensor) and isinstance(output, Tensor) and first.shape == output.shape
        fits[path] = fits.get(path, True) and is_alike

    return look


class _Skipped:
    """Within it these modules give what they got."""

    def __init__(self, model: nn.Module, paths: Sequence[str]) -> None:
        self._model, self._paths, self._handles = model, paths, list[Any]()

    def __enter__(self) -> None:
        for path in self._paths:
            module = self._model.get_submodule(path)
            self._handles.append(module.register_forward_hook(lambda _, args, __: args[0]))

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()


def _outputs(model: nn.Module, inputs: Sequence[Tensor]) -> list[object]:
    with torch.no_grad():
        return flat_outputs(model(*(x.clone() for x in inputs)))


def _loss(model: nn.Module, batches: Sequence[object], loss: Loss | None) -> float:
    if loss is None:
        return 0.0
    if not batches:
        raise UsageError("a loss was given and no batches; give both, or neither")
    with torch.no_grad():
        return sum(float(loss(model, batch)) for batch in batches) / len(batches)


def _proved(
    model: M, own: nn.Module, inputs: Sequence[Tensor], gone: list[str], effects: dict[str, float]
) -> Pruned[M]:
    plan = PruningPlan(model=type(model).__name__, shapes={}, kept={}, dropped=tuple(sorted(gone)))
    given = to_float64(inputs)
    with _Skipped(own, gone):
        expected = _outputs(own, given)
    error = distance(_outputs(apply_pruning(own, plan), given), expected)
    if not error <= TOLERANCE:
        raise PlanError(
            f"{type(model).__name__} without {', '.join(gone)} does not give what it gives with them as the identity "
            "(its forward uses their places or adds to their results); name them in keep"
        )
    smaller = apply_pruning(model, plan)
    before, after = amounts_of(model), amounts_of(smaller)
    report = PruningReport(
        num_parameters_before=before[0],
        num_parameters=after[0],
        num_bytes_before=before[1],
        num_bytes=after[1],
        work_flop_before=work_flop(model, inputs),
        work_flop=work_flop(smaller, inputs),
        blocks=tuple(DroppedBlock(name=name, effect=value, is_dropped=name in gone) for name, value in effects.items()),
        error=error,
    )
    return Pruned(smaller, plan, report, ())
