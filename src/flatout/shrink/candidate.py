"""A model on its way to being cheaper, and its task: what reductions take and return."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from flatout.core.errors import UsageError
from flatout.core.records.adapt import Method
from flatout.shrink.model_size import stored_bytes

Batch = tuple[Any, Any]
"""(inputs, targets): inputs are a tensor or a tuple of them, targets whatever the loss wants."""


@dataclass(frozen=True, kw_only=True)
class ShrinkTask:
    """What a model is for, and what may be done to it.

    `inputs` are those of one call as it is timed; the last `num_state` of them are state that comes back as the last outputs.
    `evaluate` takes something that is called like the model (with a state: `StatefulModel`, which carries it) and returns the
    metric: a number, or one number a sample, whose mean it is. `batches` gives what to train and to calibrate on, anew for
    each pass; `loss(outputs, targets)` is None where only the original model's own outputs tell what is right. Training that
    brings the metric back takes `recovery_s` at most. Where training itself is what should cost less, it takes `num_steps`
    (0: one pass over the batches) of AdamW at `learning_rate`.
    """

    inputs: tuple[Any, ...]
    evaluate: Callable[[Callable[..., Any]], Any]
    num_state: int = 0
    batches: Callable[[], Iterable[Batch]] | None = None
    loss: Callable[[Any, Any], Tensor] | None = None
    is_cost: bool = False
    allowed_loss: float = 0.0
    recovery_s: float = 60.0
    num_steps: int = 0
    learning_rate: float = 1e-3
    seed: int = 0


class MetricScore(NamedTuple):
    """The metric: its mean, and one number a sample where it comes so."""

    value: float
    samples: tuple[float, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class CandidateModel:
    """A model, how it is called, and where it comes from.

    `model` holds the weights; `call` is what is called in its place (the model itself, compiled, an engine's step), with
    `inputs`: the task's, but for the width of a state. `num_bytes` are those of its weights as they are stored. `trained`
    are the parameters that training changes, None: all, at `rate_factor` times the learning rate.
    """

    model: nn.Module
    original: nn.Module
    task: ShrinkTask
    inputs: tuple[Any, ...]
    call: Callable[..., Any]
    num_bytes: int
    trained: Sequence[nn.Parameter] | None = None
    rate_factor: float = 1.0
    is_reduced: bool = False
    """Whether weights are others than the original model's, so that training may bring its metric back."""
    notes: tuple[str, ...] = ()
    start_stateful: Callable[[], Any] | None = None
    """Creates what carries the state itself, where `call` takes none: see `StatefulModel`."""
    timed: Callable[[], object] | None = None
    """One call as a user who cares for time makes it; None: `call` with `inputs`."""

    @classmethod
    def of(cls, model: nn.Module, task: ShrinkTask) -> CandidateModel:
        """The candidate that is the original model."""
        return cls(
            model=model, original=model, task=task, inputs=task.inputs, call=model, num_bytes=stored_bytes(model)
        )

    def with_model(
        self, model: nn.Module, notes: str, *, inputs: tuple[Any, ...] | None = None, num_bytes: int | None = None
    ) -> CandidateModel:
        """The same with another model in its place."""
        return replace(
            self,
            model=model,
            call=model,
            inputs=self.inputs if inputs is None else inputs,
            num_bytes=stored_bytes(model) if num_bytes is None else num_bytes,
            is_reduced=True,
            notes=(*self.notes, notes),
        )

    def with_call(self, call: Callable[..., Any], notes: str, *, num_bytes: int | None = None) -> CandidateModel:
        """The same model, called otherwise."""
        size = self.num_bytes if num_bytes is None else num_bytes
        return replace(self, call=call, num_bytes=size, notes=(*self.notes, notes), start_stateful=None, timed=None)

    def adapted(self, method: Method, rate_factor: float) -> CandidateModel:
        """The same with its model adapted in place, which must be a copy already: that trains less, at another rate.

        Raises UsageError where the method does not fit.
        """
        from flatout.shrink.adapt.adapted_model import adapt

        found = adapt(self.model, method, seed=self.task.seed)
        note = f"{found.trained.parameters:,} of {found.trained.of_parameters:,} parameters are trained"
        return replace(self.with_model(self.model, note), trained=[*found.parameters()], rate_factor=rate_factor)

    @property
    def usable(self) -> Callable[..., Any]:
        """What a user calls: with a state, what carries it."""
        if not self.task.num_state:
            return self.call
        if self.start_stateful is not None:
            return self.start_stateful()  # type: ignore[no-any-return]
        return StatefulModel(self.call, self.inputs[len(self.inputs) - self.task.num_state :])

    def metric(self, model: nn.Module | None = None) -> MetricScore:
        """What the task's `evaluate` says: of this candidate, or of another model in its place.

        Raises UsageError when that is neither a number nor numbers.
        """
        candidate = self if model is None else replace(self, call=model, start_stateful=None)
        with torch.inference_mode():
            metric = self.task.evaluate(candidate.usable)
        if hasattr(metric, "tolist"):  # a tensor or an array
            metric = metric.tolist()
        try:
            if isinstance(metric, Iterable):
                samples = tuple(float(one) for one in metric)
                return MetricScore(math.fsum(samples) / len(samples), samples)
            return MetricScore(float(metric))
        except (TypeError, ValueError, ZeroDivisionError) as e:
            raise UsageError(
                f"the metric returned a {type(metric).__name__}; return a number, or a number for each sample: {e}"
            ) from e


class StatefulModel:
    """A model that carries its state itself: `y = stepping(x)`, an event of every row; `reset` begins anew."""

    def __init__(self, call: Callable[..., Any], start: tuple[Tensor, ...]) -> None:
        """`start` are the states before the first event; their first row is taken for every row of x."""
        self._call, self._start = call, start
        self._state: tuple[Tensor, ...] | None = None

    def reset(self) -> None:
        """Go back to the state before the first event."""
        self._state = None

    def __call__(self, *x: Tensor) -> Any:
        """The outputs but for the state."""
        state = self._state
        if state is None:
            state = tuple(s[:1].expand(x[0].shape[0], *s.shape[1:]).contiguous() for s in self._start)
        found = self._call(*x, *state)
        num = len(self._start)
        self._state = tuple(found[-num:])
        outputs = found[:-num]
        return outputs[0] if len(outputs) == 1 else outputs


def arguments(inputs: object) -> tuple[Any, ...]:
    """The arguments of a call out of a batch's inputs."""
    return inputs if isinstance(inputs, tuple) else tuple(inputs) if isinstance(inputs, list) else (inputs,)
