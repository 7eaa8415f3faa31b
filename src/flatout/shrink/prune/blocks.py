"""Whole blocks: which of them a model does without best, by trying each."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, TypeVar

import msgspec
import torch
from torch import Tensor, nn

from flatout.core.errors import PlanError, UsageError
from flatout.core.records.prune import DroppedBlock, PruningPlan
from flatout.shrink.float64_reference import float64_copy, relative_error_to_float64, to_float64
from flatout.shrink.prune.proof import TOLERANCE, outputs_of
from flatout.shrink.prune.pruning import Loss, Pruned, report_of
from flatout.shrink.prune.surgery import apply_pruning

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
    own, inputs64 = float64_copy(model), to_float64(tuple(inputs))
    before = outputs_of(own, inputs64)
    blocks = [path for path in droppable_blocks(own, inputs64) if path not in keep]
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
                with _skipped(own, [*gone, path]):
                    if loss is not None:
                        found[path] = _loss(own, batches, loss) - start
                    else:
                        found[path] = relative_error_to_float64(outputs_of(own, inputs64), before)
        effects |= found
        gone.append(min(found, key=lambda path: found[path]))
    return _proved(model, own, inputs, gone, effects)


def droppable_blocks(model: nn.Module, inputs: Sequence[Tensor]) -> list[str]:
    """Paths of the blocks that give the shape they got, in this call."""
    fits: dict[str, bool] = {}
    with ExitStack() as hooks:
        for path, module in model.named_modules():
            parent = model.get_submodule(path.rpartition(".")[0])
            if path and isinstance(parent, (nn.Sequential, nn.ModuleList)) and any(True for _ in module.parameters()):
                hooks.enter_context(module.register_forward_hook(_shape_check(path, fits)))
        outputs_of(model, inputs)
    return [path for path, is_alike in fits.items() if is_alike]


def _shape_check(path: str, fits: dict[str, bool]) -> Any:
    def look(_: nn.Module, args: tuple[object, ...], output: object) -> None:
        first = args[0] if args else None
        is_alike = isinstance(first, Tensor) and isinstance(output, Tensor) and first.shape == output.shape
        fits[path] = fits.get(path, True) and is_alike

    return look


def _skipped(model: nn.Module, paths: Sequence[str]) -> ExitStack:
    """A context in which these modules return their first input."""
    hooks = ExitStack()
    for path in paths:
        hooks.enter_context(model.get_submodule(path).register_forward_hook(lambda _, args, __: args[0]))
    return hooks


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
    plan = PruningPlan(model=type(model).__name__, shapes={}, remaining={}, dropped=tuple(sorted(gone)))
    inputs64 = to_float64(tuple(inputs))
    with _skipped(own, gone):
        expected = outputs_of(own, inputs64)
    error = relative_error_to_float64(outputs_of(apply_pruning(own, plan), inputs64), expected)
    if not error <= TOLERANCE:
        raise PlanError(
            f"{type(model).__name__} without {', '.join(gone)} does not give what it gives with them as the identity "
            "(its forward uses their places or adds to their results); name them in keep"
        )
    smaller = apply_pruning(model, plan)
    blocks = [DroppedBlock(name=name, effect=value, is_dropped=name in gone) for name, value in effects.items()]
    report = report_of(model, smaller, inputs, inputs, error=error)
    return Pruned(smaller, plan, msgspec.structs.replace(report, blocks=tuple(blocks)), ())
