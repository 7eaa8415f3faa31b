"""One kind of call against a cheaper spelling of it: attention's arguments, merged products, sparse gradients, strides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.optim.optimizer import Optimizer

from flatout.measure.timer import compare
from flatout.profiling.operators.recorder import Example, TensorMeta
from flatout.profiling.trials.scene import Refused, Scene, random_tensor
from flatout.records.trial import (
    TimeAttentionCall,
    TimeMergedLinears,
    TimeSparseEmbedding,
    TimeStackedLinears,
    TimeStrides,
    Trial,
    TrialResult,
)

_LARGEST_TABLE: Final = 200_000_000
_LAZY: Final = {
    "Adam": torch.optim.SparseAdam,
    "AdamW": torch.optim.SparseAdam,
    "SGD": torch.optim.SGD,
    "Adagrad": torch.optim.Adagrad,
}
"""The optimizer that takes sparse gradients in place of each."""
_BAG_MODES: Final = {0: "sum", 1: "mean"}
"""By the number that aten::_embedding_bag_backward is given."""

Lookup = Callable[..., Tensor]
"""(indices, table, sparse=...) -> rows, or what becomes of them."""


def attention_call(trial: TimeAttentionCall, scene: Scene) -> TrialResult:
    """scaled_dot_product_attention as called, and with one argument changed."""
    # B batch, N heads, Q query tokens, K key tokens, D head dim
    dtype, device = getattr(torch, trial.dtype), scene.device
    shape_q = (trial.batch, trial.heads, trial.q_len, trial.head_dim)
    shape_k = (trial.batch, trial.heads, trial.kv_len, trial.head_dim)
    q, k, v = (
        random_tensor(s, dtype, device=device).requires_grad_(trial.backward) for s in (shape_q, shape_k, shape_k)
    )
    mask = None
    if trial.masked:
        visible = torch.ones(trial.q_len, trial.kv_len, dtype=torch.bool, device=device)
        visible = visible.tril() if trial.cure != "no-mask" else visible
        mask = torch.zeros(visible.shape, dtype=dtype, device=device).masked_fill_(~visible, float("-inf"))
    cured_mask = mask if trial.cure == "no-dropout" else None
    cured_dropout = 0.0 if trial.cure == "no-dropout" else trial.dropout

    def now() -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=trial.dropout)

    def cured() -> Tensor:
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=cured_mask, dropout_p=cured_dropout, is_causal=trial.cure == "causal"
        )

    return timed(trial, passing(now, (q, k, v), trial.backward), passing(cured, (q, k, v), trial.backward), scene)


def merged_linears(trial: TimeMergedLinears, scene: Scene) -> TrialResult:
    """Linear layers one by one, and as one product with the weights stacked."""
    dtype, device = getattr(torch, trial.dtype), scene.device

    def random(*shape: int) -> Tensor:
        return random_tensor(shape, dtype, device=device).requires_grad_(trial.backward)

    x = random(trial.rows, trial.in_features)
    weights = [random(n, trial.in_features) for n in trial.out_features]
    biases = [random(n) if trial.bias else None for n in trial.out_features]
    total = sum(trial.out_features)
    weight, bias = random(total, trial.in_features), random(total) if trial.bias else None

    def apart() -> list[Tensor]:
        return [F.linear(x, w, b) for w, b in zip(weights, biases, strict=True)]

    def together() -> list[Tensor]:
        return list(F.linear(x, weight, bias).split(trial.out_features, dim=-1))

    first = (x, *weights, *(b for b in biases if b is not None))
    second = (x, weight) if bias is None else (x, weight, bias)
    return timed(trial, passing(apart, first, trial.backward), passing(together, second, trial.backward), scene)


def stacked_linears(trial: TimeStackedLinears, scene: Scene) -> TrialResult:
    """Equal linear layers on inputs of their own one by one, and as one batched product with their weights stacked."""
    dtype, device = getattr(torch, trial.dtype), scene.device

    def random(*shape: int) -> Tensor:
        return random_tensor(shape, dtype, device=device).requires_grad_(trial.backward)

    x = random(trial.rows, trial.num, trial.in_features)
    weights = [random(trial.out_features, trial.in_features) for _ in range(trial.num)]
    biases = [random(trial.out_features) if trial.bias else None for _ in range(trial.num)]
    weight = random(trial.num, trial.in_features, trial.out_features)
    bias = random(trial.num, 1, trial.out_features) if trial.bias else None

    def apart() -> list[Tensor]:
        return [F.linear(*given) for given in zip(x.unbind(1), weights, biases, strict=True)]

    def together() -> list[Tensor]:
        batch = x.transpose(0, 1)
        return [torch.bmm(batch, weight) if bias is None else torch.baddbmm(bias, batch, weight)]

    first = (x, *weights, *(b for b in biases if b is not None))
    second = (x, weight) if bias is None else (x, weight, bias)
    return timed(trial, passing(apart, first, trial.backward), passing(together, second, trial.backward), scene)


def sparse_embedding(trial: TimeSparseEmbedding, scene: Scene) -> TrialResult:
    """A table's lookup, backward and update, with the gradient dense and sparse."""
    example = scene.examples[trial.operator]
    kept = [a for a in example.args if isinstance(a, Tensor)] if example is not None else []
    indices = kept[0] if kept else None
    table = scene.outputs[trial.operator]
    optimizer = scene.optimizers[trial.optimizer].optimizer()
    if example is None or indices is None or table is None or len(table.shape) != 2:
        raise Refused("the indices were not kept")
    lookup: Lookup = F.embedding
    if "embedding_bag" in str(example.func):
        if len(kept) < 2 or kept[1].numel() != example.args[0][0].shape[0]:
            raise Refused("the offsets of the bags were not kept")
        offsets, mode = kept[1], _BAG_MODES.get(example.args[8])
        if mode is None:
            raise Refused("bags of maxima take no sparse gradients")

        def lookup(ids: Tensor, weight: Tensor, *, sparse: bool) -> Tensor:
            return F.embedding_bag(ids, weight, offsets, mode=mode, sparse=sparse)

    if optimizer is None or type(optimizer).__name__ not in _LAZY:
        raise Refused("this optimizer has no counterpart that takes sparse gradients")
    if table.shape[0] * table.shape[1] > _LARGEST_TABLE:
        raise Refused(f"a copy of {table.shape[0]} x {table.shape[1]} numbers would take too much memory")
    group = optimizer.param_groups[0]
    options = {k: group[k] for k in ("lr", "momentum", "weight_decay", "foreach", "fused") if k in group}
    dense = _table(table, scene)
    sparse = _table(table, scene)
    kind = _LAZY[type(optimizer).__name__]
    plain = {k: v for k, v in options.items() if k == "lr"}
    return timed(
        trial,
        _update(lookup, dense, indices, type(optimizer)([dense], **options), sparse=False),
        _update(lookup, sparse, indices, kind([sparse], **plain), sparse=True),
        scene,
        parts={"touched": float(indices.unique().numel())},
    )


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


def strides(trial: TimeStrides, scene: Scene) -> TrialResult:
    """A copy and its reader, and the reader on what was copied."""
    copy, reader = scene.examples[trial.copy], scene.examples[trial.reader]
    if copy is None or reader is None:
        raise Refused("the call was not kept")
    source = _made(copy.args[0], scene)
    if not isinstance(source, Tensor):
        raise Refused("what was copied is no tensor")
    args = [_made(a, scene) for a in reader.args]
    kwargs = {k: _made(v, scene) for k, v in reader.kwargs.items()}
    places = [i for i, a in enumerate(args) if isinstance(a, Tensor)]
    place = places[trial.argument]
    if args[place].shape != source.shape:
        raise Refused("the copy reaches its reader through a view")

    def now() -> object:
        with torch.no_grad():
            args[place] = source.clone(memory_format=torch.contiguous_format)
            return reader.func(*args, **kwargs)

    direct = [source if i == place else a for i, a in enumerate(args)]

    def cured() -> object:
        with torch.no_grad():
            return reader.func(*direct, **kwargs)

    return timed(trial, now, cured, scene)


def _made(value: Any, scene: Scene) -> Any:
    """A captured argument with random tensors in place of descriptions."""
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], TensorMeta):
        meta, stride = value
        return random_tensor(
            meta.shape, meta.dtype, device=scene.device if meta.device != "cpu" else "cpu", stride=stride
        )
    if isinstance(value, list):
        return [_made(v, scene) for v in value]
    return value


def foreach_arguments(example: Example, scene: Scene) -> tuple[list[Any], dict[str, Any]]:
    """Fresh arguments for one captured call."""
    return [_made(a, scene) for a in example.args], {k: _made(v, scene) for k, v in example.kwargs.items()}


def timed(
    trial: Trial,
    now: Callable[[], object],
    cured: Callable[[], object],
    scene: Scene,
    *,
    parts: dict[str, float] | None = None,
) -> TrialResult:
    """Both calls timed in turns."""
    timings = compare(
        {"now": now, "cured": cured},
        device=scene.device,
        min_time_s=min(0.4, scene.limit_s / 4),
        max_time_s=min(3.0, scene.limit_s),
    )
    return TrialResult(
        trial=trial,
        now_s=timings["now"].call_s.value,
        cured_s=timings["cured"].call_s.value,
        spread_fraction=timings["now"].spread or 0.0,
        parts=parts or {},
    )


def passing(
    forward: Callable[[], Tensor | list[Tensor]], inputs: tuple[Tensor, ...], backward: bool
) -> Callable[[], object]:
    """One forward pass, with the gradients of all inputs when `backward`."""
    if not backward:

        def run_forward() -> object:
            with torch.no_grad():
                return forward()

        return run_forward

    def run_both() -> object:
        out = forward()
        outputs = out if isinstance(out, list) else [out]
        return torch.autograd.grad(outputs, inputs, [torch.ones_like(o) for o in outputs], allow_unused=True)

    return run_both
