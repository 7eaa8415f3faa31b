"""A model on its way to being cheaper, and what it is for: what levers with a reduction are given and give."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

Batch = tuple[Any, Any]
"""(inputs, targets): inputs are a tensor or a tuple of them, targets whatever the loss wants."""


@dataclass(frozen=True, kw_only=True)
class Purpose:
    """What a model is for, and what may be done to it.

    `inputs` are those of one call as it is timed; the last `num_state` of them are state that comes back as the last outputs.
    `evaluate` takes something that is called like the model (with a state: `Stepping`, which carries it) and returns the
    metric: a number, or one number a sample, whose mean it is. `batches` gives what to train and to calibrate on, anew for
    each pass; `loss(outputs, targets)` is None where only the given model's own outputs tell what is right. Training that
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


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model, how it is called, and where it comes from.

    `model` holds the weights; `call` is what is called in its place (the model itself, compiled, an engine's step), with
    `inputs`: the purpose's, but for the width of a state. `num_bytes` are those of its weights as they are stored. `trained`
    are the parameters that training changes, None: all, at `rate_factor` times the learning rate.
    """

    model: nn.Module
    given: nn.Module
    purpose: Purpose
    inputs: tuple[Any, ...]
    call: Callable[..., Any]
    num_bytes: int
    trained: Sequence[nn.Parameter] | None = None
    rate_factor: float = 1.0
    is_reduced: bool = False
    """Whether weights are others than the given model's, so that training may bring its metric back."""
    told: tuple[str, ...] = ()
    carrying: Callable[[], Any] | None = None
    """Makes what carries the state itself, where `call` is not to be given one: see `Stepping`."""
    timed: Callable[[], object] | None = None
    """One call as a user who cares for time makes it; None: `call` with `inputs`."""

    @classmethod
    def of(cls, model: nn.Module, purpose: Purpose) -> Subject:
        """The model as it was given."""
        return cls(
            model=model, given=model, purpose=purpose, inputs=purpose.inputs, call=model, num_bytes=bytes_of(model)
        )

    def having(
        self, model: nn.Module, told: str, *, inputs: tuple[Any, ...] | None = None, num_bytes: int | None = None
    ) -> Subject:
        """The same with another model in its place."""
        return replace(
            self,
            model=model,
            call=model,
            inputs=self.inputs if inputs is None else inputs,
            num_bytes=bytes_of(model) if num_bytes is None else num_bytes,
            is_reduced=True,
            told=(*self.told, told),
        )

    def called(self, call: Callable[..., Any], told: str, *, num_bytes: int | None = None) -> Subject:
        """The same model, called otherwise."""
        size = self.num_bytes if num_bytes is None else num_bytes
        return replace(self, call=call, num_bytes=size, told=(*self.told, told), carrying=None, timed=None)

    @property
    def usable(self) -> Callable[..., Any]:
        """What a user calls: with a state, what carries it."""
        if not self.purpose.num_state:
            return self.call
        if self.carrying is not None:
            return self.carrying()  # type: ignore[no-any-return]
        return Stepping(self.call, self.inputs[len(self.inputs) - self.purpose.num_state :])

    def metric(self, model: nn.Module | None = None) -> Any:
        """What the purpose's `evaluate` says: of this subject, or of another model in its place."""
        subject = self if model is None else replace(self, call=model, carrying=None)
        with torch.inference_mode():
            return self.purpose.evaluate(subject.usable)


class Stepping:
    """A model that carries its state itself: `y = stepping(x)`, an event of every row; `reset` begins anew."""

    def __init__(self, call: Callable[..., Any], start: tuple[Tensor, ...]) -> None:
        """`start` are the states before the first event; their first row is taken for every row of x."""
        self._call, self._start = call, start
        self._state: tuple[Tensor, ...] | None = None

    def reset(self) -> None:
        """As before the first event."""
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


def bytes_of(model: nn.Module) -> int:
    """Of parameters and buffers, each storage once."""
    held = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in (*model.parameters(), *model.buffers())
    }
    return sum(held.values())


def arguments(inputs: object) -> tuple[Any, ...]:
    """The arguments of a call out of a batch's inputs."""
    return inputs if isinstance(inputs, tuple) else tuple(inputs) if isinstance(inputs, list) else (inputs,)


def mean_of(said: Any) -> float:
    """Of what a metric returned: a number, or numbers."""
    if hasattr(said, "tolist"):
        said = said.tolist()
    return float(fmean(said)) if isinstance(said, (list, tuple)) else float(said)
