"""Known patterns against their cure at the same shapes: attention, growing cat, recurrent cells."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flatout.measure.timer import compare
from flatout.profiling.trials.scene import Scene, random_tensor
from flatout.records.trial import (
    TimeAttention,
    TimeDistance,
    TimeGrowingCat,
    TimeNormalisation,
    TimeOneHot,
    TimePaddedProduct,
    TimeRecurrence,
    Trial,
    TrialResult,
)


def attention(trial: TimeAttention, scene: Scene) -> TrialResult:
    """softmax(q k^T) v written out, against scaled_dot_product_attention."""
    # B batch, N heads, Q query tokens, K key tokens, D head dim
    dtype, device = getattr(torch, trial.dtype), scene.device
    shape_q = (trial.batch, trial.heads, trial.q_len, trial.head_dim)
    shape_k = (trial.batch, trial.heads, trial.kv_len, trial.head_dim)
    q, k, v = (
        random_tensor(s, dtype, device=device).requires_grad_(trial.backward) for s in (shape_q, shape_k, shape_k)
    )
    mask = None
    if trial.causal or trial.masked:
        mask = torch.ones(trial.q_len, trial.kv_len, dtype=torch.bool, device=device).tril()

    def written_out() -> Tensor:
        scores = (q @ k.transpose(-2, -1)) * trial.head_dim**-0.5
        if mask is not None:
            scores = scores.masked_fill(~mask, float("-inf"))
        weights = F.dropout(scores.softmax(dim=-1), trial.dropout)
        return weights @ v

    def fused() -> Tensor:
        own_mask = None if trial.causal else mask
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=own_mask, is_causal=trial.causal, dropout_p=trial.dropout
        )

    error = None
    if trial.dropout == 0.0:
        with torch.no_grad():
            a, b = written_out(), fused()
            error = float((a - b).abs().max() / a.abs().max())
    return _result(trial, written_out, fused, (q, k, v), scene, error, backward=trial.backward)


def growing_cat(trial: TimeGrowingCat, scene: Scene) -> TrialResult:
    """Pieces appended one by one, against one cat of them all."""
    dtype = getattr(torch, trial.dtype)
    pieces = tuple(
        random_tensor(trial.piece, dtype, device=scene.device).requires_grad_(trial.backward)
        for _ in range(trial.count)
    )

    def growing() -> Tensor:
        whole = pieces[0]
        for piece in pieces[1:]:
            whole = torch.cat((whole, piece), dim=trial.dim)
        return whole

    def at_once() -> Tensor:
        return torch.cat(pieces, dim=trial.dim)

    return _result(trial, growing, at_once, pieces, scene, 0.0, backward=trial.backward)


def recurrence(trial: TimeRecurrence, scene: Scene) -> TrialResult:
    """A cell called step by step, against torch's layer over the sequence with the same weights."""
    # B batch, T steps, I input size, H hidden size
    cell: nn.RNNCellBase = getattr(nn, trial.cell)(trial.input_size, trial.hidden_size, device=scene.device)
    layer: nn.RNNBase = getattr(nn, trial.cell.removesuffix("Cell"))(
        trial.input_size, trial.hidden_size, batch_first=True, device=scene.device
    )
    with torch.no_grad():
        for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
            getattr(layer, f"{name}_l0").copy_(getattr(cell, name))
    x_BTI = random_tensor((trial.batch, trial.steps, trial.input_size), torch.float32, device=scene.device)
    is_lstm = trial.cell == "LSTMCell"

    def stepwise() -> Tensor:
        state = None
        outputs = []
        for t in range(trial.steps):
            state = cell(x_BTI[:, t], state)
            outputs.append(state[0] if is_lstm else state)
        return torch.stack(outputs, dim=1)

    def whole() -> Tensor:
        output: Tensor = layer(x_BTI)[0]
        return output

    with torch.no_grad():
        a, b = stepwise(), whole()
        error = float((a - b).abs().max() / a.abs().max())
    parameters = (*cell.parameters(), *layer.parameters())
    return _result(trial, stepwise, whole, parameters, scene, error, backward=trial.backward)


def normalisation(trial: TimeNormalisation, scene: Scene) -> TrialResult:
    """The textbook formula in separate operators, against torch's own."""
    dtype, device, width = getattr(torch, trial.dtype), scene.device, trial.shape[-1]
    x, weight, bias = (
        random_tensor(s, dtype, device=device).requires_grad_(trial.backward) for s in (trial.shape, (width,), (width,))
    )

    def layer_written_out() -> Tensor:
        mean = x.mean(dim=-1, keepdim=True)
        variance = ((x - mean) ** 2).mean(dim=-1, keepdim=True)
        return (x - mean) / torch.sqrt(variance + 1e-5) * weight + bias

    def rms_written_out() -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(dim=-1, keepdim=True) + 1e-5) * weight

    is_layer = trial.kind == "layer"
    now = layer_written_out if is_layer else rms_written_out
    inputs = (x, weight, bias) if is_layer else (x, weight)

    def cured() -> Tensor:
        return F.layer_norm(x, (width,), weight, bias) if is_layer else F.rms_norm(x, (width,), weight, 1e-5)

    with torch.no_grad():
        a, b = now(), cured()
        error = float((a - b).abs().max() / a.abs().max())
    return _result(trial, now, cured, inputs, scene, error, backward=trial.backward)


def distance(trial: TimeDistance, scene: Scene) -> TrialResult:
    """All differences written out, squared and added up, against torch.cdist and against one product: the faster counts."""
    # B batch, N points of a, M points of b, D dimensions
    dtype = getattr(torch, trial.dtype)
    a_BND, b_BMD = (
        random_tensor((trial.batch, n, trial.dim), dtype, device=scene.device).requires_grad_(trial.backward)
        for n in (trial.num_a, trial.num_b)
    )

    def written_out() -> Tensor:
        return ((a_BND[:, :, None] - b_BMD[:, None]) ** 2).sum(dim=-1)

    def cdist() -> Tensor:
        return torch.cdist(a_BND, b_BMD) ** 2

    def product() -> Tensor:
        squares = a_BND.square().sum(-1)[:, :, None] + b_BMD.square().sum(-1)[:, None]
        return torch.baddbmm(squares, a_BND, b_BMD.transpose(1, 2), alpha=-2).clamp_min(0)

    results = []
    for name, cured in (("torch.cdist", cdist), ("one product", product)):
        with torch.no_grad():
            a, b = written_out(), cured()
            error = float((a - b).abs().max() / a.abs().max())
        result = _result(trial, written_out, cured, (a_BND, b_BMD), scene, error, backward=trial.backward)
        results.append(msgspec.structs.replace(result, variant=name))
    return min(results, key=lambda r: (r.cured_s or 0.0) / (r.now_s or 1.0))


def one_hot(trial: TimeOneHot, scene: Scene) -> TrialResult:
    """One-hot rows made and multiplied, against an embedding."""
    # R rows, C classes, W width
    dtype = getattr(torch, trial.dtype)
    index_R = torch.arange(trial.rows, device=scene.device) * 7919 % trial.classes
    weight_CW = random_tensor((trial.classes, trial.width), dtype, device=scene.device).requires_grad_(trial.backward)

    def product() -> Tensor:
        return F.one_hot(index_R, trial.classes).to(dtype) @ weight_CW

    def lookup() -> Tensor:
        return F.embedding(index_R, weight_CW)

    return _result(trial, product, lookup, (weight_CW,), scene, 0.0, backward=trial.backward)


def padded_product(trial: TimePaddedProduct, scene: Scene) -> TrialResult:
    """The product at its sizes, against the same padded; forward alone, since the backward's products are rows of their own."""
    dtype = getattr(torch, trial.dtype)

    def product(rows: int, inner: int, columns: int) -> Callable[[], Tensor]:
        a = _factor(trial.batch, rows, inner, dtype, scene.device, is_transposed=trial.transposed[0])
        b = _factor(trial.batch, inner, columns, dtype, scene.device, is_transposed=trial.transposed[1])
        return lambda: a @ b

    now, cured = product(trial.rows, trial.inner, trial.columns), product(*trial.padded)
    return _result(trial, now, cured, (), scene, None, backward=False)


def _factor(batch: int, rows: int, columns: int, dtype: torch.dtype, device: str, *, is_transposed: bool) -> Tensor:
    lead = (batch,) if batch > 1 else ()
    if is_transposed:
        return random_tensor((*lead, columns, rows), dtype, device=device).transpose(-2, -1)
    return random_tensor((*lead, rows, columns), dtype, device=device)


def _result(
    trial: Trial,
    now: Callable[[], Tensor],
    cured: Callable[[], Tensor],
    inputs: tuple[Tensor, ...],
    scene: Scene,
    error: float | None,
    *,
    backward: bool,
) -> TrialResult:
    timings = compare(
        {"now": _pass(now, inputs, backward), "cured": _pass(cured, inputs, backward)},
        device=scene.device,
        min_time_s=min(0.4, scene.limit_s / 4),
        max_time_s=min(3.0, scene.limit_s),
    )
    return TrialResult(
        trial=trial,
        now_s=timings["now"].call_s.value,
        cured_s=timings["cured"].call_s.value,
        spread_fraction=timings["now"].spread or 0.0,
        error=error,
    )


def _pass(forward: Callable[[], Tensor], inputs: tuple[Tensor, ...], backward: bool) -> Callable[[], object]:
    if not backward:

        def run_forward() -> object:
            with torch.no_grad():
                return forward()

        return run_forward

    def run_both() -> object:
        out = forward()
        return torch.autograd.grad(out, inputs, torch.ones_like(out), allow_unused=True)

    return run_both
