"""Optimizer state of parameters that no backward reaches any more: memory that serves nothing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from flatout.check.observe.calls import is_wrapper
from flatout.check.observe.memory.census import Census, gradient_of, parameters_of
from flatout.core.records.usage import ModuleFact
from flatout.core.tensors.nests import tensors_in

_SCALAR_BYTES: Final = 8


class OptimizerStates:
    """Compares, over a watched step and those after it, which state was written and which parameters a backward reached."""

    def __init__(self) -> None:
        self._versions: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._reached: set[int] = set()
        self._dead: dict[tuple[str, str], list[int]] = {}
        """By module and its class, the bytes of state of each parameter that was not updated."""

    def begin(self, census: Census) -> None:
        """Note how often each tensor of state has been written."""
        self._versions = WeakIdKeyDictionary()
        for optimizer in census.optimizers:
            for state in list(optimizer.state.values()):
                for tensor in tensors_in(state):
                    self._versions[tensor] = tensor._version

    def end(self, reached: set[int]) -> None:
        """The watched step is over; `reached` holds the ids of the leaves that its backwards went to."""
        self._reached = reached

    def judge(self, census: Census) -> None:
        """Some steps later: find the state that has served nothing since."""
        if not self._reached:
            return
        paths = _paths(census)
        self._dead = {}
        for optimizer in census.optimizers:
            for parameter in parameters_of(optimizer):
                idle = [] if id(parameter) in self._reached else self._idle(optimizer, parameter)
                if idle:
                    self._dead.setdefault(paths.get(id(parameter), ("", "")), []).append(_bytes(idle))

    def facts(self) -> tuple[ModuleFact, ...]:
        """One fact for each module whose parameters have idle state; `value` is bytes."""
        return tuple(
            ModuleFact(
                name="dead-optimizer-state",
                module=module,
                kind=kind,
                value=float(sum(num_bytes)),
                text=f"{len(num_bytes)} parameters",
            )
            for (module, kind), num_bytes in self._dead.items()
        )

    def _idle(self, optimizer: Optimizer, parameter: Tensor) -> list[Tensor]:
        """The state of a parameter that is not trained, and its gradient if that is nothing but zeros; empty when it is."""
        state = [t for t in tensors_in(optimizer.state.get(parameter)) if _bytes([t]) > _SCALAR_BYTES]
        grad = gradient_of(parameter)
        if not state or (grad is not None and (is_wrapper(grad) or bool(grad.any()))):
            return []
        if grad is None:
            is_written = any(self._versions.get(t) != t._version for t in state)
            return [] if is_written else state
        return [*state, grad]


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def _paths(census: Census) -> dict[int, tuple[str, str]]:
    """By a parameter's id, the dotted path of its module below the outermost one, and the module's class."""
    above: dict[int, tuple[nn.Module, str]] = {}
    for outer in census.modules:
        for name, inner in vars(outer).get("_modules", {}).items():
            if inner is not None:
                above.setdefault(id(inner), (outer, name))
    found = {}
    for module in census.modules:
        names: list[str] = []
        top = module
        while id(top) in above and len(names) < 40:
            top, name = above[id(top)]
            names.insert(0, name)
        path = ".".join([type(top).__name__, *names])
        for parameter in vars(module).get("_parameters", {}).values():
            if parameter is not None:
                found[id(parameter)] = (path, type(module).__name__)
    return found
