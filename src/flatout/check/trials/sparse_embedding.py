"""An embedding with dense gradients, against one with sparse gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.optimizer import Optimizer

from flatout.check.observe.operators.recorder import TensorMeta
from flatout.check.trials.context import Refused, Scene, TrialEntry, random_tensor
from flatout.check.trials.timing import timed_trial
from flatout.core.records.trial import TimeSparseEmbedding, TrialResult

_LARGEST_TABLE: Final = 200_000_000
_LAZY: Final = {
    "Adam": torch.optim.SparseAdam,
    "AdamW": torch.optim.SparseAdam,
    "SGD": torch.optim.SGD,
    "Adagrad": torch.optim.Adagrad,
}
"""The optimizer that takes sparse gradients in place of each."""
_EMBEDDINGS: Final = (nn.Embedding, nn.EmbeddingBag)
_BAG_MODES: Final = {0: "sum", 1: "mean"}
"""By the number that aten::_embedding_bag_backward has for them."""

Lookup = Callable[..., Tensor]
"""(indices, table, sparse=...) -> rows, or what becomes of them."""


def run(trial: TimeSparseEmbedding, scene: Scene) -> TrialResult:
    """A table's lookup, backward and update, with the gradient dense and sparse."""
    example = scene.examples[trial.operator]
    tensors = [a for a in example.args if isinstance(a, Tensor)] if example is not None else []
    indices = tensors[0] if tensors else None
    table = scene.outputs[trial.operator]
    optimizer = scene.optimizers[trial.optimizer].optimizer()
    if example is None or indices is None or table is None or len(table.shape) != 2:
        raise Refused("the indices were not captured")
    lookup: Lookup = F.embedding
    if "embedding_bag" in str(example.func):
        if len(tensors) < 2 or tensors[1].numel() != example.args[0][0].shape[0]:
            raise Refused("the offsets of the bags were not captured")
        offsets, mode = tensors[1], _BAG_MODES.get(example.args[8])
        if mode is None:
            raise Refused("bags of maxima take no sparse gradients")

        def lookup(ids: Tensor, weight: Tensor, *, sparse: bool) -> Tensor:
            return F.embedding_bag(ids, weight, offsets, mode=mode, sparse=sparse)

    if optimizer is None or type(optimizer).__name__ not in _LAZY:
        raise Refused("this optimizer has no counterpart that takes sparse gradients")
    if _is_shared(table, scene):
        raise Refused(
            "another layer shares the table's weight: the sum of both gradients is dense, and SparseAdam raises on it"
        )
    if table.shape[0] * table.shape[1] > _LARGEST_TABLE:
        raise Refused(f"a copy of {table.shape[0]} x {table.shape[1]} numbers would take too much memory")
    group = optimizer.param_groups[0]
    options = {k: group[k] for k in ("lr", "momentum", "weight_decay", "foreach", "fused") if k in group}
    dense = _table(table, scene)
    sparse = _table(table, scene)
    kind = _LAZY[type(optimizer).__name__]
    plain = {k: v for k, v in options.items() if k == "lr"}
    return timed_trial(
        trial,
        _update(lookup, dense, indices, type(optimizer)([dense], **options), sparse=False),
        _update(lookup, sparse, indices, kind([sparse], **plain), sparse=True),
        scene,
        parts={"touched": float(indices.unique().numel())},
    )


def _is_shared(table: TensorMeta, scene: Scene) -> bool:
    """Whether an embedding of this shape has its weight in common with another module (tied weights)."""
    for root in scene.roots:
        module = root.alive
        owners = [] if module is None else [(id(p), m) for m in module.modules() for p in m.parameters(recurse=False)]
        tables = {key for key, m in owners if isinstance(m, _EMBEDDINGS) and tuple(m.weight.shape) == table.shape}
        if any(key in tables and not isinstance(m, _EMBEDDINGS) for key, m in owners):
            return True
    return False


def _table(meta: TensorMeta, scene: Scene) -> Tensor:
    return random_tensor(meta.shape, meta.dtype, device=scene.device).requires_grad_()


def _update(
    lookup: Lookup, table: Tensor, indices: Tensor, optimizer: Optimizer, *, sparse: bool
) -> Callable[[], object]:
    def update() -> object:
        optimizer.zero_grad()
        lookup(indices, table, sparse=sparse).sum().backward()
        return optimizer.step()

    return update


TRIAL: Final = TrialEntry(TimeSparseEmbedding, run)
