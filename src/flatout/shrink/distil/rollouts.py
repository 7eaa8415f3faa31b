"""Models that carry a state from event to event, as modules over whole sequences, so that they are distilled over rollouts."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flatout.core.errors import UsageError


class Rollout(nn.Module):
    """`step(x [B, ...], *state) -> (y [B, ...], *state)` over sequences: forward(x [B, T, ...]) gives y [B, T, ...].

    `step` stays the caller's module, its parameters are trained. `state` are the tensors before the first event, [1 or more,
    ...]; the first row is taken for every sequence. Student and teacher each have their own, of any widths. Errors that a student
    makes are fed back to it, as they will be when it is used. `cut`: gradients do not flow back further than so many events
    (truncated backpropagation through time); None: through the whole sequence.
    """

    def __init__(self, step: nn.Module, state: tuple[Tensor, ...], *, cut: int | None = None) -> None:
        super().__init__()
        if not state or (cut is not None and cut < 1):
            raise UsageError(
                f"{len(state)} states, cut {cut}: give the state before the first event, and a cut of 1 or more"
            )
        self.step, self._cut, self._num_state = step, cut, len(state)
        for number, tensor in enumerate(state):
            self.register_buffer(f"start_{number}", tensor[:1].detach().clone(), persistent=False)

    def forward(self, x_BTX: Tensor) -> Tensor:
        """Raises UsageError when the step does not give back as many states as it takes."""
        size = x_BTX.shape[0]
        state = [self.get_buffer(f"start_{n}") for n in range(self._num_state)]
        state = [start.expand(size, *start.shape[1:]) for start in state]
        found = []
        for t, x in enumerate(x_BTX.unbind(1)):
            if self._cut is not None and t and t % self._cut == 0:
                state = [s.detach() for s in state]
            y, *state = self.step(x, *state)
            if len(state) != self._num_state:
                raise UsageError(
                    f"the step takes {self._num_state} states and gives {len(state)}; it must give each back after its output"
                )
            found.append(y)
        return torch.stack(found, 1)
