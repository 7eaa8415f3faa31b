"""What layers of a student make, drawn towards what layers of the teacher make; watched by hooks that can be taken off."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from flatout.core.errors import UsageError
from flatout.shrink.distil.losses import attention_loss, hint_loss
from flatout.shrink.distil.samples import Inputs, as_tuple
from flatout.shrink.distil.teachers import output_of
from flatout.shrink.module_mode import in_mode

Kind = Literal["hint", "attention"]
_CHANNELS_SECOND: Final = (
    nn.modules.conv._ConvNd,
    nn.modules.batchnorm._BatchNorm,
    nn.modules.instancenorm._InstanceNorm,
    nn.GroupNorm,
)


class Features:
    """Pairs of module paths {student's: teacher's}, and the mean of their losses after each forward of both.

    'hint': mean squared distance over the teacher's mean square (FitNets). Where widths differ a linear map from the student's to
    the teacher's is learned beside the student; it is thrown away afterwards. 'attention': where the layers look (attention
    transfer); no map, any widths. Channels are dimension 1 of what convolutions and their norms give, and of four dimensions;
    else the last. `inputs` are those of one small batch: both models run on it once, to know the shapes.

    In a loop of your own: `install`, forward of teacher and student, `loss()`, and `remove` when done.
    Raises UsageError for a path that is no module, was not called, or shapes that cannot be compared.
    """

    def __init__(
        self,
        student: nn.Module,
        teacher: nn.Module,
        pairs: Mapping[str, str],
        *,
        inputs: Inputs,
        kind: Kind = "hint",
        seed: int = 0,
    ) -> None:
        if not pairs or kind not in ("hint", "attention"):
            raise UsageError(
                f"{len(pairs)} pairs of kind '{kind}'; give a pair of paths or more, 'hint' or 'attention'"
            )
        self._pairs, self._kind = dict(pairs), kind
        self._layers = [
            (_found(student, own, "student"), _found(teacher, other, "teacher")) for own, other in pairs.items()
        ]
        self._outputs: dict[
            tuple[int, int], Tensor
        ] = {}  # by number of the pair, and 0 for the student, 1 for the teacher
        self._hooks: list[RemovableHandle] = []
        self.projections = nn.ModuleDict()
        """Learned maps, by number of the pair; empty where widths agree."""
        self._probe(student, teacher, inputs, seed)

    def parameters(self) -> Iterator[nn.Parameter]:
        """Parameters of the learned maps, for the optimizer."""
        return self.projections.parameters()

    def install(self) -> None:
        """Begin to record what the layers of both models return."""
        self._outputs.clear()
        for number, pair in enumerate(self._layers):
            self._hooks += [layer.register_forward_hook(self._watch(number, side)) for side, layer in enumerate(pair)]

    def remove(self) -> None:
        """Watch no more; nothing stays on the models."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._outputs.clear()

    def loss(self) -> Tensor:
        """Loss of the last forward passes, mean over the pairs. Raises UsageError when one of a pair was not called."""
        losses = []
        for number, (own, other) in enumerate(self._taken()):
            a, b = self._comparable(number, own, other)
            losses.append(hint_loss(a, b) if self._kind == "hint" else attention_loss(a, b))
        self._outputs.clear()
        return torch.stack(losses).mean()

    def _comparable(self, number: int, own: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        to = 1 if self._kind == "attention" else -1
        own, other = (
            x.movedim(_channel_dim(layer, x), to) for layer, x in zip(self._layers[number], (own, other), strict=True)
        )
        if f"{number}" in self.projections:
            own = self.projections[f"{number}"](own)
        return own, other

    def _taken(self) -> Iterator[tuple[Tensor, Tensor]]:
        for number, names in enumerate(self._pairs.items()):
            for side, name in enumerate(names):
                if (number, side) not in self._outputs:
                    model = ("student", "teacher")[side]
                    raise UsageError(f"'{name}' of the {model} was not called in this forward; choose another layer")
            yield self._outputs[number, 0], self._outputs[number, 1]

    def _watch(self, number: int, side: int) -> Any:
        def hook(module: nn.Module, args: object, output: object) -> None:
            self._outputs[number, side] = output_of(output)

        return hook

    def _probe(self, student: nn.Module, teacher: nn.Module, inputs: Inputs, seed: int) -> None:
        """One forward of both, and the maps that are needed."""
        self.install()
        try:
            with in_mode(student, is_training=False), in_mode(teacher, is_training=False), torch.no_grad():
                teacher(*as_tuple(inputs))
                student(*as_tuple(inputs))
            for number, (own, other) in enumerate(self._taken()):
                self._prepare(number, own, other, seed)
        finally:
            self.remove()

    def _prepare(self, number: int, own: Tensor, other: Tensor, seed: int) -> None:
        a, b = self._comparable(number, own, other)
        names = list(self._pairs.items())[number]
        if self._kind == "attention":
            attention_loss(a, b)  # raises what is wrong with the shapes
            return
        if a.shape[:-1] != b.shape[:-1]:
            raise UsageError(
                f"'{names[0]}' gives {tuple(own.shape)} and '{names[1]}' {tuple(other.shape)}; but for the width they must agree"
            )
        if a.shape[-1] != b.shape[-1]:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                linear = nn.Linear(a.shape[-1], b.shape[-1])
            self.projections[f"{number}"] = linear.to(device=own.device, dtype=own.dtype)


def _channel_dim(module: nn.Module, output: Tensor) -> int:
    return 1 if isinstance(module, _CHANNELS_SECOND) or output.dim() == 4 else output.dim() - 1


def _found(model: nn.Module, path: str, side: str) -> nn.Module:
    try:
        return model.get_submodule(path)
    except AttributeError as e:
        raise UsageError(f"the {side} has no module '{path}': {e}; give a path as named_modules() tells it") from e
