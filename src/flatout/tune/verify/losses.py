"""The first losses of a run: are those of a plan like those of the untouched script on other seeds?"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from statistics import fmean, stdev
from threading import get_ident
from typing import Any, Final

import msgspec
import torch
from torch import Tensor

from flatout.core.errors import VerificationError
from flatout.core.records.allowance import Allowance
from flatout.core.records.lever import PlannedLever
from flatout.core.records.plan import T_95, LossSpread
from flatout.core.records.verdict import Equality
from flatout.core.registry import lever_of
from flatout.core.runtime.dynamo_frames import frame_outside_dynamo, outside_dynamo
from flatout.core.runtime.patches import Patches
from flatout.core.runtime.replayed_backwards import listen_to_replays
from flatout.tune.verify.fork_server import closing_servers
from flatout.tune.verify.side import SideAnswer
from flatout.tune.verify.side_process import Failed, Request, SideProcess

NUM_SEEDS: Final = 3
_LAST: Final = 0.2
"""The share of the losses, at the end, whose mean is compared."""
_LEAST_ALLOWED: Final = 0.005
"""Of the loss: a change of precision that costs less is none that training for longer would not make good. Our choice."""
_FEWEST: Final = 10
_ALLOWED_ON_ONE_SEED: Final = 0.05
"""Where how much seeds differ is not known: only what learns much less is sorted out."""


class FirstLosses:
    """Adds up what a script calls backward on, and calls `on_end` with a mean once there were `num_losses`.

    A loss that a GradScaler scaled counts as it was before, and one of several micro-batches that a plan joined (`each`) as so
    many. It costs a few small operators for each of the last fifth of them, waits for the device once, and nothing afterwards.
    """

    def __init__(self, num_losses: int, on_end: Callable[[float], None], *, each: int = 1) -> None:
        """Nothing is watched until `install`."""
        self.num_losses_so_far = 0
        self._each = each
        self._num_counted = 0
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
        @frame_outside_dynamo
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

    @outside_dynamo
    def _add(self, tensors: Sequence[Any]) -> None:
        if self.num_losses_so_far >= self._num_losses:
            return  # a script that has imported `backward` by name goes on calling this
        self.num_losses_so_far += self._each
        if self.num_losses_so_far > self._first_counted:
            self._num_counted += self._each
            with torch.no_grad():
                for tensor in (t for t in tensors if isinstance(t, Tensor)):
                    loss = torch.view_as_real(tensor) if tensor.is_complex() else tensor
                    loss = loss.detach().float().sum() / self._scales.get(id(tensor), 1.0)
                    before = self._sums.get(loss.device)
                    self._sums[loss.device] = loss if before is None else before + loss
        self._scales.clear()
        if self.num_losses_so_far >= self._num_losses:
            self.remove()
            self._on_end(sum(float(part) for part in self._sums.values()) / self._num_counted)


def joined_losses(levers: Iterable[PlannedLever]) -> int:
    """How many losses of the untouched script one of a plan with these levers stands for; 0 where they cannot be compared.

    Raises PlanError for a lever that there is not.
    """
    return math.prod(lever_of(planned.id).num_losses(planned.parameters) for planned in levers)


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


class LossRuns:
    """Runs of scripts to their first losses, each made once for a script, a plan and a seed."""

    def __init__(self, process: Callable[[Request], SideProcess], *, timeout_s: float) -> None:
        """Nothing runs yet; `process` starts a run when one is asked for."""
        self._process = process
        self._timeout_s = timeout_s
        self._answers: dict[tuple[str, str, int, int], SideAnswer] = {}

    def compare(
        self, base: Request, after: Request, seeds: Sequence[int], *, num_losses: int, allowed: Allowance, at_once: bool
    ) -> Equality:
        """Whether training with `after` gets as far as with the base, by the mean of the last fifth of the first losses.

        It may be higher by `allowed`, by as much as seeds differ (their standard deviation), or by half a per cent, on one seed
        by five. Of a script that ends before, all losses are taken. Both sides of a seed run together where they may
        (`at_once`). Raises Failed when one does not get so far.
        """
        self._run([base, after] if at_once else [base], seeds[0], num_losses)
        first = self._answers[self._key(base, seeds[0], num_losses)]
        if not first.error and first.mean_loss is None and _FEWEST <= first.num_steps < num_losses:
            num_losses = first.num_steps
        before, gaps = [], []
        for seed in seeds:
            for group in [[base, after]] if at_once else [[base], [after]]:
                self._run(group, seed, num_losses)
            one, two = (self._mean(side, seed, num_losses) for side in (base, after))
            before.append(one)
            gaps.append(two - one)
        spread, share = (stdev(before), _LEAST_ALLOWED) if len(before) > 1 else (0.0, _ALLOWED_ON_ONE_SEED)
        limit = max(allowed.of_metric(fmean(before)), spread, share * abs(fmean(before)))
        gap, num = fmean(gaps), len(gaps)
        room = T_95[num] * stdev(gaps) / math.sqrt(num) if num > 1 else 0.0
        low, high = gap - room, gap + room
        span = f" ({low:+.3g} to {high:+.3g}) over {num} seeds" if num > 1 else " on one seed"
        because = (
            f"the mean of the last fifth of the first {num_losses:,} losses is {fmean(before):.5g}, and {gap:+.3g} with the "
            f"change{span}; {limit:.3g} is allowed"
        )
        holds = True if high <= limit else False if low > limit else None
        return Equality(guarantee="quality", holds=holds, num_steps=num_losses, because=because)

    def _run(self, sides: Sequence[Request], seed: int, num_losses: int) -> None:
        """Have them run at once, as far as they have not yet."""
        missing = [side for side in sides if self._key(side, seed, num_losses) not in self._answers]
        with ExitStack() as stack:
            processes = [stack.enter_context(self._process(_losing(side, seed, num_losses))) for side in missing]
            for side, process in zip(missing, processes, strict=True):
                answer = process.answer(timeout_s=self._timeout_s)
                self._answers[self._key(side, seed, num_losses)] = answer

    def _mean(self, side: Request, seed: int, num_losses: int) -> float:
        try:
            return _mean_of(self._answers[self._key(side, seed, num_losses)], side.target, num_losses)
        except VerificationError as e:
            raise Failed(str(e)) from e

    @staticmethod
    def _key(side: Request, seed: int, num_losses: int) -> tuple[str, str, int, int]:
        return (side.target, side.plan, seed, num_losses)


def _losing(side: Request, seed: int, num_losses: int) -> Request:
    return msgspec.structs.replace(side, seed=seed, is_whole=True, num_losses=num_losses, folder="", num_recorded=0)
