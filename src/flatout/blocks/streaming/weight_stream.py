"""Weights that are sent to the device ahead of their use: which modules', when each is sent and dropped, how all is restored."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, Protocol, Self, TypeVar

import torch
from torch import Tensor, nn

from flatout.core.errors import UsageError
from flatout.core.runtime.patches import Undo, replace_forward, replaced_forward


class SentWeights(Protocol):
    """Weights of one module on the device, or on their way."""

    @property
    def versions(self) -> list[int]:
        """Those of the weights when they were sent."""


Sent = TypeVar("Sent", bound=SentWeights)


class StreamedModule(ABC):
    """A module with a `forward` of its own until `restore`; its weights are replaced, and its buffers are on the device."""

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self.module = module
        self.weights: dict[str, nn.Parameter] = dict(module.named_parameters())
        self.forward: Callable[..., Any] = module.forward
        """The forward that the module had."""
        self._undo_forward: Undo | None = None
        index = {id(weight): i for i, weight in enumerate(self.weights.values())}
        self._sites = [
            (inner, name, index[id(weight)])
            for inner in module.modules()
            for name, weight in inner._parameters.items()
            if weight is not None
        ]
        self._buffers = [(m, n, b.device) for m in module.modules() for n, b in m._buffers.items() if b is not None]
        for inner, name, _ in self._buffers:
            inner._buffers[name] = inner._buffers[name].to(device)  # type: ignore[union-attr]

    @abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The forward of the streamed module."""

    def replace_forward(self) -> None:
        """Calls of the module come here from now on."""
        self._undo_forward = replace_forward(self.module, self)

    def put_in(self, values: Iterable[Tensor]) -> None:
        """Have the module compute with other tensors, in the order of `weights`."""
        tensors = [*values]
        for inner, name, i in self._sites:
            inner._parameters[name] = tensors[i]  # type: ignore[assignment]

    def take_out(self) -> None:
        """Give the module its own parameters again."""
        self.put_in(self.weights.values())

    def versions(self) -> list[int]:
        """How often each weight was changed in place, as torch counts."""
        return [weight._version for weight in self.weights.values()]

    def restore(self) -> None:
        """Give the module its own forward again, and move its buffers back to their devices."""
        if self._undo_forward is not None:
            self._undo_forward()
        for inner, name, home in self._buffers:
            inner._buffers[name] = inner._buffers[name].to(home)  # type: ignore[union-attr]


class WeightStream(ABC, Generic[Sent]):
    """Modules of which some have their weights on the device, or on their way: a window that moves with the calls.

    `undo` ends it, as leaving its `with` does.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.bytes_in = 0
        """Of weights sent to the device until now."""
        self._coming = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._modules: Sequence[StreamedModule] = ()
        self._here: dict[int, Sent] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.undo()

    @property
    def num_live(self) -> int:
        """Modules whose weights are on the device, or on their way."""
        return len(self._here)

    def wait(self) -> None:
        """Until no weight is on its way. For a change of weights after a forward that no backward followed."""
        if self._coming is not None:
            self._coming.synchronize()

    @abstractmethod
    def undo(self) -> None:
        """Put weights and buffers back where they were. A second time it does nothing."""

    @abstractmethod
    def _send(self, number: int) -> Sent:
        """Queue a module's weights, on the stream that they come on."""

    @abstractmethod
    def _free(self, number: int, sent: Sent) -> None:
        """Their memory can be used again after what is queued on the current stream."""

    def _move_window(self, numbers: Sequence[int]) -> None:
        """Have these modules' weights on the device, or on their way, as they are now, and no others."""
        for i in [i for i, s in self._here.items() if i not in numbers or s.versions != self._modules[i].versions()]:
            self._drop(i)
        for i in numbers:
            if i not in self._here:
                self._here[i] = self._send(i)

    def _drop(self, number: int) -> None:
        self._free(number, self._here.pop(number))

    def _drop_all(self) -> None:
        for number in list(self._here):
            self._drop(number)


def check_streamable(modules: Sequence[nn.Module], kind: str) -> None:
    """Raises UsageError where a module's weights could not be taken away; `kind` is what messages call one ('layer')."""
    owner: dict[int, int] = {}
    for at, module in enumerate(modules):
        for path, inner in module.named_modules():
            name = f"{kind} {at}" + (f", '{path}'" if path else "")
            if owner.setdefault(id(inner), at) != at:
                raise UsageError(f"{name} is in {kind} {owner[id(inner)]} too; give {kind}s that share no module")
            if isinstance(inner, nn.RNNBase):
                raise UsageError(
                    f"{name} is a {type(inner).__name__}, which keeps weights in a list of its own; leave it out"
                )
            if isinstance(replaced_forward(inner), StreamedModule):
                raise UsageError(f"{name} is streamed already; undo that first")
            if any(type(p) is not nn.Parameter or p.is_meta for p in inner.parameters(recurse=False)):
                raise UsageError(
                    f"{name} has parameters that are DTensors, meta or otherwise no plain ones; leave it out"
                )


def streaming_device(device: torch.device | str) -> torch.device:
    """The device, with its index. Raises UsageError for one that weights cannot be streamed to."""
    device = torch.device(device)
    if device.type not in ("cpu", "cuda") or (device.type == "cuda" and not torch.cuda.is_available()):
        raise UsageError(f"device '{device}': give 'cuda' on a machine with a GPU, or 'cpu'")
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device
