"""Products with the weights of one layer: their seconds in both directions, and the bytes of casts and adapters beside them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from flatout.machine.cost.waves import Rates, product_s
from flatout.scale.case import StepCase
from flatout.scale.rates import rates_of
from flatout.scale.sizes import LayerKind, expert_matrices, feed_matrices, mixer_matrices, shared_matrices

FEWER_BITS: Final[Mapping[str, int]] = {"float8": 8, "mxfp8": 8, "nvfp4": 4}
"""Of a number, in types whose products need a cast."""
_CAST: Final = 5
"""Bytes read and written to make a number of half precision one of 8 bits with a scale of its tensor: read for the largest, read
again, written."""
_CAST_AGAIN: Final = 3
"""The same with the scale known, for the transposed copy that the backward needs."""


class LayerProducts(NamedTuple):
    """Products with one layer's weights: seconds forward and of both kinds of gradients, bytes of casts, their number; seconds of
    the last ones forward; and bytes of adapters beside them.
    """

    forward_s: float
    inputs_s: float
    weights_s: float
    cast_bytes: float
    back_cast_bytes: float
    num: int
    last_s: float
    adapter_bytes: float
    back_adapter_bytes: float


def layer_products(case: StepCase, rates: Rates, kind: LayerKind) -> LayerProducts:
    """The fullest expert rank's: it has more tokens than the mean, and the others wait for it. Experts' products are one grouped
    product, each with its own tokens."""
    model, layout, tokens = case.model, case.layout, case.tokens
    software = case.software
    has_less = software.dtype in FEWER_BITS
    whole = software.half_layers / model.layers if has_less else 0.0
    of_attention = 1.0 if "attention" in software.half_parts else whole
    every = [_LayerProduct(n, k, tokens, 1, of_attention) for n, k in mixer_matrices(model, kind, layout.tensor)]
    if kind.mixer == "state":
        every = [one._replace(half=whole) for one in every]
    last = every[-1:]
    if kind.is_sparse:
        shared = [_LayerProduct(n, k, tokens, 1, whole) for n, k in shared_matrices(model, layout.tensor)]
        if model.expert_hidden and "latent-experts" in software.half_parts:
            shared[-2:] = [one._replace(half=1.0) for one in shared[-2:]]
        experts = [_LayerProduct(*one, whole) for one in expert_products(case)]
        every += [*experts, *shared]
        last = [experts[1], *(shared[1:2] if model.shared_inner else [])]
    elif kind.feed == "dense":
        feed = [_LayerProduct(n, k, tokens, 1, whole) for n, k in feed_matrices(model, model.inner, layout.tensor)]
        every, last = [*every, *feed], feed[1:2]
    cast = back_cast = 0.0
    if has_less:
        often = 1 / layout.num_micro_batches if software.casts_weights_once else 1.0
        cast = software.cast_passes * sum(one.less * _CAST * (one.m * one.k + often * one.n * one.k) for one in every)
        back_cast = software.cast_passes * sum(
            one.less * _CAST * one.m * one.n
            + one.less * _CAST_AGAIN * (software.trained_share * one.m * one.k + often * one.n * one.k)
            for one in every
        )
    half_rates, size = rates_of(case, case.product_dtype) if has_less else rates, product_itemsize(case)
    # gradients of weights are added to those of the micro-batches before
    added_bytes = software.gradient_bytes * (2 if layout.num_micro_batches > 1 else 1)

    def seconds(products: Iterable[_LayerProduct], order: str, result_bytes: float) -> float:
        """Seconds of products with rows, columns and depth in that order of m, n and k."""
        total = 0.0
        for one in products:
            rows, columns, depth = (getattr(one, name) for name in order)
            for share, rates_, itemsize in ((1 - one.half, rates, size), (one.half, half_rates, case.width)):
                if share:
                    total += share * product_s(
                        rates_, rows, columns, depth, batch=one.num, itemsize=itemsize, result_bytes=result_bytes
                    )
        return total

    return LayerProducts(
        seconds(every, "mnk", case.width),
        seconds(every, "mkn", case.width),
        software.trained_share * seconds(every, "nkm", added_bytes),
        cast,
        back_cast,
        len(every),
        seconds(last, "mnk", case.width),
        *_adapter_bytes(case, every if software.adapted == "all" else every[: kind.mixer == "attention"]),
    )


def _adapter_bytes(case: StepCase, products: Sequence[_LayerProduct]) -> tuple[float, float]:
    """Bytes that adapters read and write, forward and backward (LoRA; Hu et al., 2021): what a product takes; what its adapter
    gives, and the sum of both. Backward gradients of what it gives for both factors, what it takes for one, and the sum of
    gradients. Their own products are so small that this is what they take."""
    if not case.software.adapter_rank:
        return 0.0, 0.0
    forward = sum(one.num * one.m * (one.k + 4 * one.n) for one in products)
    backward = sum(one.num * one.m * (2 * one.n + 4 * one.k) for one in products)
    ranks = sum(6 * one.num * one.m * case.software.adapter_rank for one in products)
    return (forward + ranks) * case.width, (backward + ranks) * case.width


class _LayerProduct(NamedTuple):
    """`num` products with a weight of `n` columns and depth `k` for `m` tokens, of which a share `half` is made in half
    precision."""

    n: int
    k: int
    m: int
    num: int
    half: float

    @property
    def less(self) -> float:
        """How many are made in fewer bits."""
        return self.num * (1 - self.half)


def expert_products(case: StepCase) -> list[tuple[int, int, int, int]]:
    """Products of a rank's experts: columns, depth, tokens of each expert, and how many experts."""
    model, layout = case.model, case.layout
    local = max(1, model.num_experts // layout.expert)
    each = max(1, round(routed_tokens(case) / local))
    return [(n, k, each, local) for n, k in expert_matrices(model, layout.expert_ranks)]


def product_itemsize(case: StepCase) -> float:
    """Bytes of a number that products take."""
    bits = FEWER_BITS.get(case.software.dtype)
    return case.width if bits is None else bits / 8


def routed_tokens(case: StepCase) -> float:
    """Tokens, each as often as an expert takes it, that the fullest rank's experts get of a micro-batch."""
    layout, model = case.layout, case.model
    fullest = case.constants.routing_imbalance if layout.expert > 1 else 1.0
    return case.tokens * model.experts_per_token * fullest * layout.expert_ranks / layout.tensor
