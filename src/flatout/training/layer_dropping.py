"""Progressive layer dropping (Zhang and He 2020): blocks are left out of training steps, the deeper and later the more.

At step t of T a block is kept with the chance 1 - i/L * (1 - theta(t)), i its number from 1 to L, where
theta(t) = (1 - lowest) * exp(-rate * t / T) + lowest: none is left out at first, and in the end the last block is kept with the
chance `lowest`. What a kept block adds to its input is divided by its chance, so that the sum's expectation is what the whole
block gives.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from hashlib import blake2b
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from flatout.errors import UsageError
from flatout.profiling.patching import Patches

_RATE: Final = 100.0
"""gamma * T of the paper (section 4.2): the schedule is at its end after a few hundredths of the steps."""


def kept_chance(
    block: int, step: int, *, num_blocks: int, steps: int, lowest: float = 0.5, rate: float = _RATE
) -> float:
    """Of a block, counted from 0, at a step, counted from 0.

    >>> kept_chance(3, 0, num_blocks=4, steps=100), kept_chance(3, 10_000, num_blocks=4, steps=100)
    (1.0, 0.5)
    """
    theta = (1 - lowest) * math.exp(-rate * step / steps) + lowest
    return 1 - (block + 1) / num_blocks * (1 - theta)


class LayerDropping:
    """Drops blocks of `model.<path>`, a list of them, in training; `at(step)` before each step, `undo` when done.

    A block maps its first argument to a tensor of the same shape by adding to it (a residual block), so that it can be left out.
    In evaluation mode all are used, unscaled: bit for bit the model as it was. Whether a block is kept depends on (seed, step,
    block) alone: the same on all ranks, after a resume, and in a recomputed forward; no random number is drawn and no device
    waited for. Parameters of a dropped block get no gradient in that step: DistributedDataParallel needs
    `find_unused_parameters=True`.

    Raises UsageError for a path without blocks, values out of range, and a block that does not keep the shape of its input.
    """

    def __init__(
        self,
        model: nn.Module,
        path: str,
        *,
        steps: int,
        lowest: float = 0.5,
        rate: float = _RATE,
        seed: int = 0,
    ) -> None:
        if steps < 1 or not 0 < lowest <= 1 or not rate >= 0:
            raise UsageError(
                f"steps {steps}, lowest {lowest:g}, rate {rate:g}: give steps of 1 or more, lowest in (0, 1], rate of 0 or more"
            )
        self._path, self._seed = path, seed
        self._steps, self._lowest, self._rate = steps, lowest, rate
        self._blocks = _blocks_of(model, path)
        self._model, self._patches, self._step = model, Patches(), 0
        for number, block in enumerate(self._blocks):
            self._patches.set(block, "forward", partial(self._forward, number, block, block.forward))

    @property
    def step(self) -> int:
        """At which the chances are now."""
        return self._step

    def at(self, step: int) -> None:
        """From here on the chances and draws of this step, counted from 0."""
        if step < 0:
            raise UsageError(f"step {step} is below 0; steps count from 0")
        self._step = step

    def undo(self) -> None:
        """The blocks' own forward again."""
        self._patches.undo()

    def chance(self, block: int, step: int) -> float:
        """That a block is kept."""
        options = {"num_blocks": len(self._blocks), "steps": self._steps}
        return kept_chance(block, step, lowest=self._lowest, rate=self._rate, **options)

    def is_kept(self, block: int, step: int) -> bool:
        """What is drawn for a block at a step."""
        return _uniform(self._seed, step, block) < self.chance(block, step)

    def kept_fraction(self, steps: range | None = None) -> float:
        """Share of the blocks that is expected to be kept, mean over these steps (None: all of the schedule)."""
        steps = steps if steps is not None else range(self._steps)
        num = len(self._blocks)
        return sum(self.chance(block, step) for step in steps for block in range(num)) / (num * len(steps))

    def expected_flop(self, *inputs: Tensor) -> tuple[float, int]:
        """FLOP of a forward of the model: (expected, mean over the schedule; with all blocks).

        One forward is run in evaluation mode; products and convolutions count, as in torch's counter.
        """
        own = [0] * len(self._blocks)
        before = [(m, m.training) for m in self._model.modules()]
        self._model.eval()
        hooks = []
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            for number, block in enumerate(self._blocks):
                hooks += _counting(own, number, block, counter.get_total_flops)
            try:
                self._model(*inputs)
            finally:
                for hook in hooks:
                    hook.remove()
                for m, was in before:
                    m.training = was
            whole = counter.get_total_flops()
        dropped = sum(
            flop * (1 - sum(self.chance(block, step) for step in range(self._steps)) / self._steps)
            for block, flop in enumerate(own)
        )
        return whole - dropped, whole

    def told(self, *inputs: Tensor) -> str:
        """The saving that is expected, in a sentence."""
        expected, whole = self.expected_flop(*inputs)
        kept = self.kept_fraction()
        return (
            f"{len(self._blocks)} blocks of '{self._path}', {kept:.1%} of them kept on average over {self._steps} steps: "
            f"{whole:.4g} FLOP of a forward become {expected:.4g} ({1 - expected / whole:.1%} less)"
        )

    def _forward(
        self, number: int, block: nn.Module, forward: Callable[..., Any], x: Any, *rest: Any, **named: Any
    ) -> Any:
        if not block.training:
            return forward(x, *rest, **named)
        if not isinstance(x, Tensor):
            raise UsageError(
                f"block {number} of '{self._path}' got a {type(x).__name__} first; only a tensor can be passed on"
            )
        if not self.is_kept(number, self._step):
            return x
        out = forward(x, *rest, **named)
        if not isinstance(out, Tensor) or out.shape != x.shape:
            what = f"a tensor {tuple(out.shape)}" if isinstance(out, Tensor) else f"a {type(out).__name__}"
            raise UsageError(
                f"block {number} of '{self._path}' made {what} from {tuple(x.shape)}; a block that can be left out gives a "
                "tensor of its input's shape"
            )
        chance = self.chance(number, self._step)
        return out if chance == 1 else torch.lerp(x, out, 1 / chance)


def _blocks_of(model: nn.Module, path: str) -> list[nn.Module]:
    try:
        container = model.get_submodule(path)
    except AttributeError as e:
        raise UsageError(f"the model has no module '{path}': {e}; give the path of its list of blocks") from e
    blocks = list(container.children()) if isinstance(container, (nn.ModuleList, nn.Sequential)) else []
    if not blocks:
        raise UsageError(
            f"'{path}' is a {type(container).__name__}; give the path of a ModuleList or Sequential with blocks in it"
        )
    return blocks


def _counting(own: list[int], number: int, block: nn.Module, total: Callable[[], int]) -> list[Any]:
    def before(module: nn.Module, args: object) -> None:
        own[number] -= total()

    def after(module: nn.Module, args: object, out: object) -> None:
        own[number] += total()

    return [block.register_forward_pre_hook(before), block.register_forward_hook(after)]


def _uniform(*numbers: int) -> float:
    """In [0, 1), from a BLAKE2b of the numbers: as good as independent for any two that differ."""
    text = ",".join(map(str, numbers))
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little") / 2**64
