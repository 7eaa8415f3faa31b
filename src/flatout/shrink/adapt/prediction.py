"""What a training step would take with a method: measured on copies, before anything is changed.

The plain model's step and those of adapted copies are timed in the same rounds: forward, the optimizer, and the whole step.
What forward and the optimizer leave of the step is backward.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn

from flatout.core.errors import UsageError
from flatout.core.records.adapt import Method, Prediction, StepCost
from flatout.core.tensors.nests import tree_leaves
from flatout.machine.measure.stats import median, median_estimate
from flatout.machine.measure.timer import TimerClock, clock_for, compare_times
from flatout.shrink.adapt.adapted_model import adapt
from flatout.shrink.model_size import saved_bytes

Optimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
StepLoss = Callable[[Any], Tensor]
OPTIMIZERS: Final[dict[str, Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9),
}


def mean_square_loss(outputs: Any) -> Tensor:
    """The mean of squares of all floating-point outputs, summed: a loss where none is given."""
    found = [t.float().square().mean() for t in tree_leaves(outputs) if isinstance(t, Tensor) and t.is_floating_point()]
    if not found:
        raise UsageError("the model returns no floating-point tensor; give a loss")
    return torch.stack(found).sum()


def predict_step(
    model: nn.Module,
    inputs: Sequence[Any],
    *methods: Method,
    loss: StepLoss = mean_square_loss,
    optimizer: str | Optimizer = "adamw",
    max_time_s: float = 10.0,
    clock: TimerClock | None = None,
) -> tuple[Prediction, ...]:
    """What each method would cost, beside the plain model's step, in the mode (train or eval) that the model is in.

    `loss` is called with the outputs; without one it is the mean of their squares. `optimizer` is a name (adamw, adam, sgd,
    momentum) or makes one from parameters. Takes memory for a copy of the model and its training with each method, and once
    more for the plain one; the model, its gradients and the random state stay as they are.

    Raises UsageError where the loss does not depend on anything that is trained, and what adapting the model raises.
    """
    if isinstance(optimizer, str) and optimizer not in OPTIMIZERS:
        raise UsageError(
            f"optimizer '{optimizer}' is none of {', '.join(OPTIMIZERS)}; or give a function that makes it"
        )
    make = OPTIMIZERS[optimizer] if isinstance(optimizer, str) else optimizer
    device = next(model.parameters()).device
    with torch.random.fork_rng(devices=[device] if device.type != "cpu" else []):
        steps = [_CopiedStep(model, tuple(inputs), method, loss, make) for method in (None, *methods)]
        fns = {f"{part} {i}": fn for i, step in enumerate(steps) for part, fn in step.parts().items()}
        timings = compare_times(
            fns,
            device=device,
            min_time_s=min(2.0, max_time_s),
            max_time_s=max_time_s,
            clock=WarmedClock(clock_for(device) if clock is None else clock),
        )
    samples = [{part: timings[f"{part} {i}"].samples_s for part in step.parts()} for i, step in enumerate(steps)]
    costs = [step.cost(own) for step, own in zip(steps, samples, strict=True)]
    found = []
    for method, cost, own in zip(methods, costs[1:], samples[1:], strict=True):
        pairs = list(zip(own["step"], samples[0]["step"], strict=True))
        ratio = median_estimate([adapted_s / plain_s for adapted_s, plain_s in pairs])
        found.append(
            Prediction(
                method=method,
                plain=costs[0],
                adapted=cost,
                step_ratio=ratio.value,
                step_ratio_low=ratio.low,
                step_ratio_high=ratio.high,
                num_rounds=len(pairs),
            )
        )
    return tuple(found)


class WarmedClock:
    """Times what follows an untimed call of the same: memory and caches are then as they are in a loop of it."""

    def __init__(self, clock: TimerClock) -> None:
        self._clock = clock

    def elapsed_s(self, fn: Callable[[], object], num_calls: int) -> float:
        fn()
        return self._clock.elapsed_s(fn, num_calls)


class _CopiedStep:
    """The training step of a copy of the model, adapted by the method if there is one; it has run once."""

    def __init__(
        self, model: nn.Module, inputs: tuple[Any, ...], method: Method | None, loss: StepLoss, make: Optimizer
    ) -> None:
        self._model, self._inputs, self._loss = copy.deepcopy(model), inputs, loss
        if method is not None:
            adapt(self._model, method)
        self._trained = [p for p in self._model.parameters() if p.requires_grad]
        own = [*self._model.parameters(), *self._model.buffers(), *tree_leaves(inputs)]
        value, self._saved_bytes = saved_bytes(self.forward, without=own)
        if not value.requires_grad:
            raise UsageError("the loss does not depend on anything that is trained; train something that it sees")
        self._optimizer = make(self._trained)
        self.run()

    def forward(self) -> Tensor:
        return self._loss(self._model(*self._inputs))

    def parts(self) -> dict[str, Callable[[], object]]:
        """What is timed, by name."""
        return {"forward": self.forward, "optimizer": self._optimizer.step, "step": self.run}

    def run(self) -> None:
        self._optimizer.zero_grad()
        self.forward().backward()
        self._optimizer.step()

    def cost(self, samples_s: dict[str, tuple[float, ...]]) -> StepCost:
        state = [t for one in self._optimizer.state.values() for t in one.values() if isinstance(t, Tensor)]
        rounds = zip(samples_s["step"], samples_s["forward"], samples_s["optimizer"], strict=True)
        return StepCost(
            trained_parameters=sum(p.numel() for p in self._trained),
            gradient_bytes=sum(p.nbytes for p in self._trained),
            state_bytes=sum(t.nbytes for t in state),
            saved_bytes=self._saved_bytes,
            step_s=median(samples_s["step"]),
            forward_s=median(samples_s["forward"]),
            backward_s=median([max(step - forward - update, 0.0) for step, forward, update in rounds]),
            optimizer_s=median(samples_s["optimizer"]),
        )
