"""The first losses of a run: are those of a plan like those of the untouched script on other seeds?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import get_ident
from typing import Any, Final

import msgspec
import torch
from torch import Tensor

from flatout.core.errors import VerificationError
from flatout.core.records.plan import LossSpread
from flatout.core.runtime.patches import Patches
from flatout.core.runtime.replayed_backwards import listen_to_replays
from flatout.tune.verify.fork_server import closing_servers
from flatout.tune.verify.side import SideAnswer
from flatout.tune.verify.side_process import Request, SideProcess

NUM_SEEDS: Final = 3
_LAST: Final = 0.2
"""The share of the losses, at the end, whose mean is compared."""


class FirstLosses:
    """Adds up what a script calls backward on, and calls `on_end` with a mean once there were `num_losses`.

    A loss that a GradScaler scaled counts as it was before. It costs a few small operators for each of the last fifth of them,
    waits for the device once, and nothing afterwards.
    """

    def __init__(self, num_losses: int, on_end: Callable[[float], None]) -> None:
        """Nothing is watched until `install`."""
        self.num_losses_so_far = 0
        self._num_losses = num_losses
        self._first_counted = num_losses - max(1, round(_LAST * num_losses))
        self._on_end = on_end
        self._sums: dict[torch.device, Tensor] = {}
        self._scales: dict[int, Tensor] = {}
        """The scale of what a GradScaler returned last, by the identity of that."""
        self._patches = Patches()
        self._thread_id = get_ident()
        self._in_backward = False
        self._stop_listening: Callable[[], None] = lambda: None

    def install(self) -> None:
        """Begin to watch what backward is called on."""
        self._patches.set(torch.autograd, "backward", self._watching(torch.autograd.backward))
        self._patches.set(torch.amp.GradScaler, "scale", self._noting(torch.amp.GradScaler.scale))
        self._stop_listening = listen_to_replays(self._add)

    def remove(self) -> None:
        """Watch no longer, and undo both patches."""
        self._stop_listening()
        self._patches.undo()

    def _watching(self, original: Callable[..., None]) -> Callable[..., None]:
        def backward(tensors: Tensor | Sequence[Tensor], *args: Any, **kwargs: Any) -> None:
            if self._in_backward or get_ident() != self._thread_id:
                return original(tensors, *args, **kwargs)
            self._in_backward = True
            try:
                original(tensors, *args, **kwargs)
            finally:
                self._in_backward = False
            self._add((tensors,) if isinstance(tensors, Tensor) else tensors)

        return backward

    def _noting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def scale(scaler: torch.amp.GradScaler, outputs: Any) -> Any:
            scaled = original(scaler, outputs)
            if scaler.is_enabled() and scaler._scale is not None and isinstance(scaled, Tensor):
                self._scales = {id(scaled): scaler._scale}
            return scaled

        return scale

    def _add(self, tensors: Sequence[Any]) -> None:
        if self.num_losses_so_far >= self._num_losses:
            return  # a script that has imported `backward` by name goes on calling this
        self.num_losses_so_far += 1
        if self.num_losses_so_far > self._first_counted:
            with torch.no_grad():
                for tensor in (t for t in tensors if isinstance(t, Tensor)):
                    loss = torch.view_as_real(tensor) if tensor.is_complex() else tensor
                    loss = loss.detach().float().sum() / self._scales.get(id(tensor), 1.0)
                    before = self._sums.get(loss.device)
                    self._sums[loss.device] = loss if before is None else before + loss
        self._scales.clear()
        if self.num_losses_so_far == self._num_losses:
            self.remove()
            total = sum(float(part) for part in self._sums.values())
            self._on_end(total / (self._num_losses - self._first_counted))


def loss_spread(
    script: Request, num_losses: int, run: str, *, timeout_s: float, on_progress: Callable[[str], None] = lambda _: None
) -> LossSpread:
    """The mean of the last fifth of the first losses of the untouched script, on each of three seeds.

    Raises VerificationError when it fails, takes longer than `timeout_s`, or ends before.
    """
    means = []
    with closing_servers() as servers:
        for seed in range(NUM_SEEDS):
            on_progress(f"the untouched script's first {num_losses:,} losses, seed {seed + 1} of {NUM_SEEDS}")
            wanted = msgspec.structs.replace(script, seed=seed, is_whole=True, num_losses=num_losses)
            with SideProcess(wanted, servers) as process:
                answer = process.answer(timeout_s=timeout_s)
            means.append(_mean_of(answer, script.target, num_losses))
    return LossSpread(num_losses=num_losses, means=tuple(means), run=run)


def _mean_of(answer: SideAnswer, name: str, num_losses: int) -> float:
    if answer.mean_loss is not None:
        return answer.mean_loss
    short = f"it ended after {answer.num_steps:,}, ask for as many at most"
    is_there = answer.num_steps >= num_losses  # JSON has no NaN
    why = answer.error or ("the mean of the last is no finite number" if is_there else short)
    raise VerificationError(f"'{name}' did not come to {num_losses:,} losses: {why}")
