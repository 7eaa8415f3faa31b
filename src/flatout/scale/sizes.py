"""How many numbers a transformer's layers have, and how many of them a device of a layout has."""

from __future__ import annotations

from typing import NamedTuple

from flatout.core.records.scale import Layout, ModelShape, Software


def number_bytes(software: Software) -> int:
    """Bytes of a weight or an activation: 2, also where products are made in 8 bits, or 4 in single precision."""
    return 4 if software.dtype in ("float32", "tf32") else 2


def num_parameters(model: ModelShape) -> tuple[int, int]:
    """Parameters (of one layer with all its experts, of one embedding), norms and biases left out: they are a thousandth.

    >>> num_parameters(ModelShape(hidden=1024, layers=24, heads=16, vocab=50257, seq=1024))
    (12582912, 51463168)
    """
    return sum(layer_parameters(model)), model.vocab * model.hidden


def layer_parameters(model: ModelShape) -> tuple[int, int]:
    """Parameters (of one layer without its experts, of its experts): a single feed-forward is no expert.

    >>> layer_parameters(ModelShape(hidden=8, layers=1, heads=1, vocab=9, seq=1, num_experts=4))
    (256, 2048)
    """
    attention, feed = (sum(n * k for n, k in part) for part in matrices(model, 1))
    return (attention, feed * model.num_experts) if model.num_experts > 1 else (attention + feed, 0)


def num_active(model: ModelShape) -> int:
    """Parameters of one layer that a token meets: those of its own experts."""
    attention, feed = (sum(n * k for n, k in part) for part in matrices(model, 1))
    return attention + feed * model.experts_per_token


def matrices(model: ModelShape, ranks: int) -> tuple[tuple[tuple[int, int], ...], tuple[tuple[int, int], ...]]:
    """Sizes (columns of the result, depth) of the weights on one of `ranks`: attention's, and those of one feed-forward."""
    keys = model.key_heads * model.head_width
    attention = ((model.hidden + 2 * keys) // ranks, model.hidden), (model.hidden, model.hidden // ranks)
    up = (model.inner // ranks, model.hidden)
    return attention, (up, (model.hidden, model.inner // ranks), *((up,) if model.is_gated else ()))


def num_weights(model: ModelShape) -> int:
    """Number of tensors of one layer, where each product has its own: those of q, k and v are apart, and there are two norms.

    >>> num_weights(ModelShape(hidden=8, layers=1, heads=1, vocab=9, seq=1))
    8
    """
    attention, feed = matrices(model, 1)
    return len(attention) + 2 + len(feed) + 2


def factor_parameters(model: ModelShape, ranks: int, *, rank: int) -> tuple[int, int]:
    """Parameters as in `layer_parameters`, but of factors (m, rank) and (rank, n) of each matrix, as it lies on one of
    `ranks`, times these.
    """
    attention, feed = (rank * ranks * sum(n + k for n, k in part) for part in matrices(model, ranks))
    return (attention, feed * model.num_experts) if model.num_experts > 1 else (attention + feed, 0)


class WeightPart(NamedTuple):
    """Parameters of one device, and how many of the data ranks hold different ones: 1, or those that divide the experts."""

    numbers: float
    expert: int


def weight_parts(dense: float, experts: float, layout: Layout) -> tuple[WeightPart, ...]:
    """Parts of so many parameters that a device of the layout holds before data ranks shard them."""
    if layout.expert == 1:
        return (WeightPart((dense + experts) / layout.tensor, 1),)
    both = WeightPart(dense / layout.tensor, 1), WeightPart(experts / layout.expert / layout.tensor, layout.expert)
    return tuple(part for part in both if part.numbers)


def sharded_parameters(parts: tuple[WeightPart, ...], layout: Layout) -> float:
    """Parameters of one device, when those ranks that hold the same divide them."""
    return sum(part.numbers / max(1, layout.sharing // part.expert) for part in parts)


def device_parameters(parts: tuple[WeightPart, ...]) -> float:
    """Parameters that one device holds."""
    return sum(part.numbers for part in parts)
