"""What a step does that a graph cannot hold, found by running it once operator by operator, with the line that does it."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from types import FrameType
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_WAITS: Final = {
    "aten::_local_scalar_dense": "the host reads a number (.item(), bool(), int(), float() or a branch on a tensor)",
    "aten::is_nonzero": "the host reads a number (a branch on a tensor)",
    "aten::equal": "the host reads whether two tensors are equal",
}
_SHAPES: Final = {
    f"aten::{name}": f"{name}: the size of its result depends on numbers"
    for name in ("nonzero", "masked_select", "unique2", "_unique2", "unique_dim", "unique_consecutive", "argwhere")
}
_FOLDERS: Final = tuple(str(Path(path).parent) for path in (torch.__file__, __file__))


class Watching(TorchDispatchMode):
    """Inside this `with`: `refusals`, each a sentence with the line, of what cannot be captured on `device`.

    `state`: tensors that the step may change; another that it changes, and that it has not made itself, is a refusal.
    """

    def __init__(self, device: torch.device, state: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.refusals: list[str] = []
        self._device = device
        self._own = {_memory(t) for t in state}
        self._kept: list[Tensor] = []  # so that no memory is given out twice, and new memory is known as such

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = {_memory(t) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        self._look(func, args, kwargs)
        made = func(*args, **kwargs)
        for t in tree_leaves(made):
            if isinstance(t, Tensor) and _memory(t) not in given:
                self._own.add(_memory(t))
                self._kept.append(t)
        return made

    def _look(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        name = func._schema.name
        why = _WAITS.get(name) or _SHAPES.get(name)
        if name == "aten::index" and any(
            isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8) for i in args[1] or ()
        ):
            why = "an index by a mask: the size of its result depends on numbers"
        if name in ("aten::_to_copy", "aten::copy_"):
            why = self._moved(name, args, kwargs)
        for argument, value in zip(func._schema.arguments, args, strict=False):
            info = argument.alias_info
            if info is not None and info.is_write and isinstance(value, Tensor) and _memory(value) not in self._own:
                why = f"a tensor {tuple(value.shape)} is changed that was not named in `state`"
        if why is not None:
            self.refusals.append(f"{why}, at {_line()}")

    def _moved(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        """A copy between host and device that the host would wait for."""
        source = args[1] if name == "aten::copy_" else args[0]
        target = args[0].device if name == "aten::copy_" else torch.device(kwargs.get("device") or source.device)
        if source.device.type != target.type and not source.is_pinned():
            return f"a tensor {tuple(source.shape)} goes from {source.device.type} to {target.type}"
        return None


def _memory(t: Tensor) -> int:
    return t.untyped_storage()._cdata if t.layout is torch.strided else id(t)


def _line() -> str:
    """The innermost line that is neither torch's nor ours."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_FOLDERS):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else "an unknown line"
