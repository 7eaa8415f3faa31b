"""The check that a layout computes what one process computes: loss and gradients of one step, side by side."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from torch import Tensor, nn

from flatout.blocks.parallel.layouts import parallelize
from flatout.blocks.parallel.pipeline import Loss
from flatout.blocks.parallel.tensor_parallel import gather_whole
from flatout.blocks.parallel.world import World
from flatout.core.errors import VerificationError
from flatout.core.records.scale import Layout
from flatout.core.tensors.nests import tree_map_only

_BOUND: Final = 1e-5
"""Of the largest number of a gradient, in float32: a few hundred roundings."""
_OF_ALL: Final = 1e-6
"""Of the largest number of all gradients: parameters whose true gradient is zero have noise alone."""
_WORSE: Final = 8.0
"""How much worse than one process's own error against float64 a gradient may be: sums over ranks go in another order."""


class Agreement(NamedTuple):
    """The worst gradient: `error` is its largest difference from float64, `own_error` that of one process in float32, `scale` its
    largest number. `loss` and `true_loss` as the layout and as float64 have them."""

    num_parameters: int
    name: str
    error: float
    own_error: float
    scale: float
    loss: float
    true_loss: float

    def __str__(self) -> str:
        return (
            f"{self.num_parameters} gradients agree; the worst is '{self.name}', off by {self.error:.1e} where its largest "
            f"number is {self.scale:.1e}; loss {self.loss:.7g}, in float64 {self.true_loss:.7g}"
        )


class _Worst(NamedTuple):
    share: float
    name: str
    error: float
    own_error: float
    scale: float


def check_layout(
    model: nn.Module,
    layout: Layout,
    world: World,
    *args: Any,
    target: Any,
    loss: Loss,
    keywords: Mapping[str, Any] | None = None,
    blocks: str = "",
) -> Agreement:
    """Take one step of copies of a model, once parallel and once in each process alone, on one global batch; what they differ by.

    `args`, `keywords` and `target` are of the whole global batch, the same on all ranks. Every gradient must be as near to its
    value in float64 as one process in float32 comes, within a factor of 8 or 1e-5 of its largest number. A large layout is
    checked on a small model of the same make; each process holds it three times. Without dropout, whose masks differ.

    Raises VerificationError with the first parameter, in the model's order, that is wrong, on all ranks.
    """
    keyword_args = dict(keywords or {})
    size = layout.micro_batch
    example, example_words = tree_map_only(Tensor, lambda t: t[:size], (tuple(args), keyword_args))
    parallel = parallelize(copy.deepcopy(model), layout, world, example=example, keywords=example_words, blocks=blocks)
    exact, losses = _gradients(copy.deepcopy(model).double(), args, keyword_args, target, loss, layout)
    own, _ = _gradients(copy.deepcopy(model), args, keyword_args, target, loss, layout)
    mine = parallel.share((tuple(args), keyword_args, target))
    found = float(parallel.step(*mine[0], target=mine[2], loss=loss, **mine[1]))
    most = max((float(g.abs().max()) for g in exact.values()), default=0.0)
    worst, names = _Worst(0.0, "", 0.0, 0.0, 0.0), []
    for name, parameter in parallel.named_parameters():
        names.append(name)
        one = _compared(name, parameter.grad, exact, own, most)
        worst = max(worst, one, key=lambda w: w.share)
    return _agreement_of_all(worst, names, sorted(exact), found, losses, world)


def _gradients(
    model: nn.Module, args: tuple[Any, ...], keywords: Mapping[str, Any], target: Any, loss: Loss, layout: Layout
) -> tuple[dict[str, Tensor], float]:
    """The gradients of the mean over all micro-batches of all ranks, on the host, and the loss."""
    wide = next(model.parameters()).dtype
    size, total = layout.micro_batch, 0.0
    num = layout.global_batch // size

    def piece(nest: Any, n: int) -> Any:
        def cut(t: Tensor) -> Tensor:
            part = t[n * size : (n + 1) * size].cpu()
            return part.to(wide) if part.is_floating_point() else part

        return tree_map_only(Tensor, cut, nest)

    model.cpu()
    for n in range(num):
        value = loss(model(*piece(args, n), **piece(dict(keywords), n)), piece(target, n)) / num
        value.backward()
        total += float(value.detach())
    return {n: p.grad for n, p in model.named_parameters(remove_duplicate=False) if p.grad is not None}, total


def _compared(
    name: str, gradient: Tensor | None, exact: Mapping[str, Tensor], own: Mapping[str, Tensor], most: float
) -> _Worst:
    if name not in exact:
        return _Worst(0.0, name, 0.0, 0.0, 0.0)
    true = exact[name]
    scale = float(true.abs().max())
    if gradient is None:
        return _Worst(float("inf"), name, scale, 0.0, scale)
    error = float((gather_whole(gradient).detach().cpu().double() - true).abs().max())
    own_error = float((own[name].double() - true).abs().max())
    allowed = max(_BOUND * scale, _WORSE * own_error, _OF_ALL * most)
    return _Worst(error / allowed if allowed else float(error > 0), name, error, own_error, scale)


def _agreement_of_all(
    worst: _Worst, names: list[str], wanted: list[str], found: float, true: float, world: World
) -> Agreement:
    """Compare all ranks' results, and return the worst of all on each."""
    gathered = world.gathered((worst, names))
    checked = {name for _, some in gathered for name in some}
    worst = max((one for one, _ in gathered), key=lambda one: one.share)
    if not worst.share <= 1.0:
        raise VerificationError(
            f"the layout computes another gradient of '{worst.name}': off by {worst.error:.1e} where its largest number is "
            f"{worst.scale:.1e} and one process is off by {worst.own_error:.1e}; positions that the forward counts itself, "
            "dropout, and attention that is not scaled_dot_product_attention are what goes wrong most often"
        )
    if not abs(found - true) <= 1e-5 * max(1.0, abs(true)):
        raise VerificationError(f"the layout's loss is {found:.9g}, and {true:.9g} in one process")
    num = len(checked & set(wanted))
    return Agreement(num, worst.name, worst.error, worst.own_error, worst.scale, found, true)
