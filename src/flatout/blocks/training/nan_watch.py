"""NaN and infinity are noticed while the device goes on: a flag on the device, copied to the host, read when it is there."""

from __future__ import annotations

from collections import deque
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from flatout.blocks.training.snapshot import copied
from flatout.core.errors import NotFiniteError, UsageError

_LATE: Final = 4


class _Pending(NamedTuple):
    """A flag on its way to the host: 0 or 1 in pinned memory once the event has come to pass."""

    step: int
    flag: Tensor
    there: torch.cuda.Event


class _Good(NamedTuple):
    """Weights as they were after a step."""

    step: int
    states: list[Any]


class NanWatch:
    """Call it with the loss (and whatever else should stay finite, as the norm of the gradients) after each optimizer step.

    It raises NotFiniteError at most `late` steps after the step whose numbers were not finite. On a device the host does not
    wait for that: the flag is copied on a stream of its own and looked at when it has come. Only a host that runs `late` steps
    ahead of its device waits for the oldest of them, while the device has all the others to do. On a CPU the error comes at
    once.

    With `keep_every`, `states` (of model, optimizer, ...) are copied every so many steps, on their device, and held for
    good when a later step has shown them to be; `restore()` puts the last good ones back and says after which step they were.
    """

    def __init__(self, *states: Any, late: int = _LATE, keep_every: int = 0) -> None:
        if late < 1 or keep_every < 0:
            raise UsageError(
                f"late {late} and keep_every {keep_every}: a watch is 1 step late at least, and keeps every 0 or more"
            )
        if bool(states) != bool(keep_every):
            raise UsageError(
                "states are kept with `keep_every` above 0 and something to keep, as the model; give both or neither"
            )
        self._holders: tuple[nn.Module | torch.optim.Optimizer, ...] = states
        self._late, self._keep_every = late, keep_every
        self._step = 0
        self._pending: deque[_Pending] = deque()
        self._stream: torch.cuda.Stream | None = None
        self._flags: list[Tensor] = []
        self._good: _Good | None = None
        self._candidate: _Good | None = None
        self._spare: _Good | None = None
        """Whose memory the next copy is made in."""

    def __call__(self, *watched: Tensor) -> None:
        """One step's numbers. Raises NotFiniteError for this step on a CPU, for one of the last `late` on a device."""
        if not watched:
            raise UsageError("nothing is watched; give the loss")
        with torch.no_grad():
            bad = torch.stack([t.detach().isfinite().all().logical_not() for t in watched]).any()
        if bad.is_cuda:
            self._send(bad)
            while self._pending and self._pending[0].there.query():
                self._take()
        else:
            self._learn(self._step, bool(bad))
        if self._keep_every and self._step % self._keep_every == 0:
            self._keep()
        self._step += 1

    def finish(self) -> None:
        """Wait for what is under way. Raises NotFiniteError as a call does."""
        while self._pending:
            self._take()

    def restore(self) -> int:
        """Put the last good states back; returns the step after which they were. Raises UsageError when there is none."""
        if self._good is None:
            raise UsageError("no state is known to be good yet; keep some with `keep_every`")
        self._pending.clear()
        self._candidate = None
        for holder, state in zip(self._holders, copied(self._good.states), strict=True):
            holder.load_state_dict(state)
        return self._good.step

    # -- on a device ----------------------------------------------------------------------------------------------------------

    def _send(self, bad: Tensor) -> None:
        if self._stream is None:
            self._stream = torch.cuda.Stream(bad.device)
            self._flags = [torch.zeros((), dtype=torch.bool, pin_memory=True) for _ in range(self._late)]
        if len(self._pending) == self._late:
            self._take()
        flag = self._flags[self._step % self._late]
        self._stream.wait_stream(torch.cuda.current_stream(bad.device))
        with torch.cuda.stream(self._stream):
            flag.copy_(bad, non_blocking=True)
            bad.record_stream(self._stream)
            there = torch.cuda.Event()
            there.record(self._stream)
        self._pending.append(_Pending(self._step, flag, there))

    def _take(self) -> None:
        pending = self._pending.popleft()
        pending.there.synchronize()
        self._learn(pending.step, bool(pending.flag))

    # -- what is known --------------------------------------------------------------------------------------------------------

    def _learn(self, step: int, is_bad: bool) -> None:
        if is_bad:
            advice = f"; restore() puts the weights after step {self._good.step} back" if self._good is not None else ""
            raise NotFiniteError(
                f"step {step}: what is watched is NaN or infinite, noticed in step {self._step}{advice}", step=step
            )
        if self._candidate is not None and step > self._candidate.step:
            self._spare, self._good, self._candidate = self._good, self._candidate, None

    def _keep(self) -> None:
        if self._candidate is not None:
            return  # it has not been shown to be good yet
        states = [holder.state_dict() for holder in self._holders]
        into = self._spare.states if self._spare is not None else None
        self._candidate, self._spare = _Good(self._step, copied(states, into=into)), None
