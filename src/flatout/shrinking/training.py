"""Training as it costs: a few steps of a subject's own, on a copy."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from itertools import chain, repeat
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from flatout.errors import UsageError
from flatout.levers.subjects import Batch, Subject, arguments


class Training:
    """A subject's training: AdamW on its trained parameters, over the purpose's batches again and again.

    Works on the subject's model itself, which levers have made a copy of. Raises UsageError without batches or a loss.
    """

    def __init__(self, subject: Subject) -> None:
        purpose = subject.purpose
        if purpose.batches is None or purpose.loss is None:
            raise UsageError("what training costs is measured with --data and --loss; give both")
        self._model, self._loss, self._batches = subject.model, purpose.loss, purpose.batches
        self._trained = (
            [p for p in subject.model.parameters() if p.requires_grad]
            if subject.trained is None
            else [*subject.trained]
        )
        if not self._trained:
            raise UsageError("no parameter of the model is trained")
        self._optimizer = torch.optim.AdamW(self._trained, lr=purpose.learning_rate * subject.rate_factor)
        self._first = next(iter(purpose.batches()), None)
        if self._first is None:
            raise UsageError("--data gives no batch")
        self.device = self._trained[0].device

    def step(self, batch: Batch | None = None) -> Tensor:
        """One step on `batch`, or on the first one."""
        inputs, targets = batch or self._first  # type: ignore[misc]
        self._optimizer.zero_grad(set_to_none=True)
        loss = self._loss(self._model(*arguments(inputs)), targets)
        loss.backward()
        self._optimizer.step()
        return loss.detach()

    def run(self, num_steps: int) -> None:
        """So many steps over the batches, from their beginning, in training mode; the mode is put back."""
        before = self._model.training
        self._model.train()
        try:
            for batch, _ in zip(self._endless(), range(num_steps), strict=False):
                self.step(batch)
        finally:
            self._model.train(before)

    def _endless(self) -> Iterator[Batch]:
        return chain.from_iterable(self._batches() for _ in repeat(None))

    @property
    def num_bytes(self) -> int:
        """Of weights, of gradients and two moments of what is trained, and of what the first batch's forward keeps."""
        weights = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in self._model.parameters()}
        trained = sum(p.numel() * p.element_size() for p in self._trained)
        return sum(weights.values()) + 3 * trained + self._kept(weights)

    def _kept(self, weights: dict[int, int]) -> int:
        kept: dict[int, int] = {}
        alive: list[Tensor] = []  # so that no storage is counted at an address that another one had

        def pack(tensor: Tensor) -> Tensor:
            at = tensor.untyped_storage().data_ptr()
            if at not in weights:
                kept[at] = tensor.untyped_storage().nbytes()
                alive.append(tensor)
            return tensor

        inputs, targets = self._first  # type: ignore[misc]
        with torch.random.fork_rng(), saved_tensors_hooks(pack, lambda tensor: tensor):
            self._loss(self._model(*arguments(inputs)), targets)
        return sum(kept.values())


def copied(model: nn.Module) -> nn.Module:
    """A copy of the model with weights of its own."""
    made: Any = copy.deepcopy(model)
    return made  # type: ignore[no-any-return]
