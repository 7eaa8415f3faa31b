"""Compiled calls for shapes that usually come; a rare one, as an epoch's smaller last batch, is computed without compiling."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from typing import Any, Final

import torch
from torch import Tensor, nn

from flatout.core.tensors.nests import tensors_in

_EARLY: Final = 16
"""Calls, with and without gradients each, whose shapes are compiled at once: those that a proof compares are among them."""
_RAGGED: Final = 3
"""So many kinds of shapes among the early calls: batches vary, and one dynamic graph is for all of them."""
_MANY_KINDS: Final = 32
"""So many kinds of rare shapes: they vary after all."""
_FEWEST: Final = 20
_USUAL_SHARE: Final = 0.1
"""Of the calls since it came first: what is rarer never earns back a compilation, which takes as long as hundreds of calls."""
_FEWEST_EVALUATED: Final = 300
"""Calls of an evaluation with one kind of shapes until it is compiled, too, in our judgement. With three graphs for its samples
and evaluations a run of makemore's transformer took 51 s from nothing, 21 s with them cached, 32 s untouched (two cores)."""


class UsualShapes:
    """Calls `compiled` for shapes that come usually, and `plain` for those that are rare: nothing is compiled anew for them."""

    def __init__(
        self,
        compiled: Callable[..., Any],
        plain: Callable[..., Any],
        *,
        evaluated: nn.Module | None = None,
        is_ragged: bool = False,
    ) -> None:
        """`evaluated` is a module that is trained: calls of it without gradients, once it had some or while it is in the mode of
        evaluation, are plain until they are many. `is_ragged`: shapes vary all the time.
        """
        self._compiled = compiled
        self._plain = plain
        self._evaluated = evaluated
        self._is_trained = False
        self._is_ragged = is_ragged
        self._num_calls: Counter[bool] = Counter()
        self._usual: set[tuple[bool, Hashable]] = set()
        self._rare: dict[tuple[bool, Hashable], tuple[int, int]] = {}
        """Calls of a rare kind, and of all kinds when it came first."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return self._compiled(*args, **kwargs)
        return (self._compiled if self._is_usual(_shapes(args, kwargs)) else self._plain)(*args, **kwargs)

    def _is_usual(self, shapes: Hashable) -> bool:
        has_gradients = torch.is_grad_enabled()
        self._num_calls[has_gradients] += 1
        kind, num = (has_gradients, shapes), self._num_calls[has_gradients]
        is_evaluation = self._is_evaluation(has_gradients=has_gradients)
        if kind in self._usual or (not is_evaluation and self._has_many_kinds(has_gradients=has_gradients)):
            return True
        times, first = self._rare.get(kind, (0, num))
        self._rare[kind] = times + 1, first
        fewest = _FEWEST_EVALUATED if is_evaluation else _FEWEST
        is_often = times + 1 >= fewest and times + 1 >= _USUAL_SHARE * (num - first + 1)
        if (is_evaluation or num > _EARLY) and not is_often:
            return False
        self._usual.add(kind)
        del self._rare[kind]
        return True

    def _is_evaluation(self, *, has_gradients: bool) -> bool:
        if self._evaluated is None:
            return False
        self._is_trained |= has_gradients
        return not has_gradients and (self._is_trained or not self._evaluated.training)

    def _has_many_kinds(self, *, has_gradients: bool) -> bool:
        """Whether shapes vary, so that one dynamic graph is for all of them."""
        num_usual, num_rare = (sum(one[0] is has_gradients for one in kinds) for kinds in (self._usual, self._rare))
        return self._is_ragged or num_usual >= _RAGGED or num_rare >= _MANY_KINDS


def _shapes(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable:
    return tuple(
        leaf.shape if isinstance(leaf, Tensor) else tuple(t.shape for t in tensors_in(leaf))
        for leaf in (*args, *kwargs.values())
        if isinstance(leaf, (Tensor, list, tuple, dict))
    )
