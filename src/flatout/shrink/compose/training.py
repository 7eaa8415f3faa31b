"""Cost of training: a few steps of a candidate's own, on a copy."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, repeat

import torch
from torch import Tensor

from flatout.core.errors import UsageError
from flatout.shrink.candidate import Batch, CandidateModel, arguments
from flatout.shrink.model_size import saved_bytes
from flatout.shrink.module_mode import in_mode


class Training:
    """Training of a candidate: AdamW on its trained parameters, over the task's batches again and again.

    Works on the candidate's model itself, which reductions have made a copy of. Raises UsageError without batches or a loss.
    """

    def __init__(self, candidate: CandidateModel) -> None:
        task = candidate.task
        if task.batches is None or task.loss is None:
            raise UsageError("what training costs is measured with --data and --loss; give both")
        self._model, self._loss, self._batches = candidate.model, task.loss, task.batches
        self._trained = (
            [p for p in candidate.model.parameters() if p.requires_grad]
            if candidate.trained is None
            else [*candidate.trained]
        )
        if not self._trained:
            raise UsageError("no parameter of the model is trained")
        self._optimizer = torch.optim.AdamW(self._trained, lr=task.learning_rate * candidate.rate_factor)
        self._first = next(iter(task.batches()), None)
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
        with in_mode(self._model, is_training=True):
            for batch, _ in zip(self._endless(), range(num_steps), strict=False):
                self.step(batch)

    def _endless(self) -> Iterator[Batch]:
        return chain.from_iterable(self._batches() for _ in repeat(None))

    @property
    def num_bytes(self) -> int:
        """Bytes of weights, of gradients and two moments of what is trained, and of what the first batch's forward saves."""
        weights = [*self._model.parameters()]
        storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in weights}
        trained = sum(p.numel() * p.element_size() for p in self._trained)
        inputs, targets = self._first  # type: ignore[misc]
        with torch.random.fork_rng():
            _, saved = saved_bytes(lambda: self._loss(self._model(*arguments(inputs)), targets), without=weights)
        return sum(storages.values()) + 3 * trained + saved
