"""Bytes that a layer keeps of one micro-batch from its forward to its backward, and what is not kept since it is computed again.

Counted tensor by tensor, as Korthikanti et al. (Reducing activation recomputation in large transformer models, 2022, section 4)
do.
"""

from __future__ import annotations

from typing import Final

from flatout.core.records.scale import Constants, Layout, ModelShape, Software
from flatout.scale.sizes import LayerKind, number_bytes

_OPERATORS_SAVED: Final = 0.55
"""Of a layer's activations, where every other product and all attention is saved and the rest is made again (torchtitan's
selective checkpointing of operators)."""
IMBALANCE: Final = Constants().routing_imbalance
"""Tokens of the fullest expert rank over their mean, where nobody says otherwise."""
_EIGHT: Final = ("float8", "mxfp8", "nvfp4")
"""Types whose products save their inputs in 8 bits or fewer for the gradients of weights."""


def layer_share(model: ModelShape, layout: Layout, layers: int) -> float:
    """Share of the layers of a part of a stage that so many are."""
    return min(1.0, layers / -(-model.layers // (layout.pipeline * layout.parts_per_stage)))


def recomputed_share(model: ModelShape, layout: Layout) -> float:
    """Share of the layers that a backward computes again, where not all of a stage's parts are."""
    return layer_share(model, layout, layout.recompute_layers) if layout.recompute_layers else 1.0


def activation_bytes(
    model: ModelShape, layout: Layout, software: Software, kind: LayerKind, *, imbalance: float = IMBALANCE
) -> float:
    """Bytes that one layer keeps of one micro-batch for its backward."""
    has_scores = layout.recompute in ("none", "full") or (
        layout.recompute == "parts" and "attention" not in layout.recomputed
    )
    saved = _all_bytes(model, layout, software, kind, scores=has_scores, imbalance=imbalance)
    if layout.recompute == "operators":
        return (
            _OPERATORS_SAVED * saved
            if kind.is_sparse or kind.blocks < 2 or model.key_rank
            else _operators_bytes(model, layout, software)
        )
    if layout.recompute != "full":
        return saved - _bytes_of_parts(model, layout, software, kind)
    between = layout.tensor if layout.is_sequence_parallel else 1
    tokens = layout.micro_batch * model.seq // layout.context
    share = recomputed_share(model, layout)
    return share * tokens * model.hidden * number_bytes(software) / between + (1 - share) * saved


def _operators_bytes(model: ModelShape, layout: Layout, software: Software) -> float:
    """Bytes where every other product is saved, from the first on: of queries, values, a gate or the first of two, and the last
    of three; with a layer's input and what attention gives."""
    tokens, width = layout.micro_batch * model.seq // layout.context, number_bytes(software)
    between = layout.tensor if layout.is_sequence_parallel else 1
    around = model.hidden * (2 if model.is_gated else 1) / between
    divided = (2 * model.heads + model.key_heads) * model.head_width + model.inner
    return tokens * (around + divided / layout.tensor) * width


def _bytes_of_parts(model: ModelShape, layout: Layout, software: Software, kind: LayerKind) -> float:
    """Bytes that are not saved, since the parts that make them are computed again."""
    width, ranks = number_bytes(software), layout.tensor
    tokens = layout.micro_batch * model.seq // layout.context
    between = ranks if layout.is_sequence_parallel else 1
    routed = tokens * model.experts_per_token * layout.expert_ranks / ranks
    inner = tokens * model.inner / ranks if kind.feed == "dense" else 0.0
    if kind.is_sparse:
        inner = tokens * model.shared_inner / ranks + routed * model.expert_inner / layout.expert_ranks
    gates = 3 if model.is_gated else 2
    bytes_of = {
        "attention": 0.0,
        "norms": kind.blocks * tokens * model.hidden * width / between,
        "gates": inner * width,
        "latent": tokens * model.heads * (2 * model.query_width + model.head_width) * width / ranks
        if model.key_rank and kind.mixer == "attention"
        else 0.0,
        "feed-forward": 0.0 if kind.is_sparse else gates * inner * width,
        "experts": gates * inner * width if kind.is_sparse else 0.0,
    }
    return sum(bytes_of[name] for name in layout.recomputed)


def _all_bytes(
    model: ModelShape, layout: Layout, software: Software, kind: LayerKind, *, scores: bool, imbalance: float
) -> float:
    """Bytes with nothing recomputed but, without `scores`, attention."""
    hidden, ranks, width = model.hidden, layout.tensor, number_bytes(software)
    tokens = layout.micro_batch * model.seq // layout.context
    between = ranks if layout.is_sequence_parallel else 1
    saved = 1 if software.dtype in _EIGHT else width  # of what products take
    # inputs of the norms, of the first products, masks of dropout
    around = kind.blocks * tokens * hidden * (width + saved + software.has_dropout) / between
    if model.streams > 1:  # the streams themselves instead of a norm's input, and what goes into it
        around += kind.blocks * tokens * hidden * model.streams * width / between
    if software.divided_by == "tensors" and ranks > 1:
        # inputs of the first products are kept as they were gathered, and attention's result is laid out anew
        around += tokens * hidden * width * (2 * (1 - 1 / between) + 1 / ranks)
    if software.autocast_alone and layout.num_devices == 1:
        # float32 between layers, and a cast for each product: of queries, keys and values, of a gate and what it lets through
        copies = (2 if kind.mixer == "attention" else 0) + (model.is_gated and kind.feed == "dense")
        around += tokens * hidden * (kind.blocks * (4 - width) + copies * width)
    mixed = _mixed_bytes(model, layout, software, kind, saved=saved)
    # results of the first products, of a gate's function where that is no one kernel, and what the last product takes
    of_gate = ((2 if software.fuses_gate else 3) if model.is_gated else 1) * width + saved
    feed = 0.0
    if kind.feed == "dense":
        feed = tokens * model.inner * of_gate / ranks
    elif kind.feed == "experts":
        feed = tokens * model.shared_inner * of_gate / ranks
        fullest = imbalance if layout.expert > 1 else 1.0
        routed = fullest * tokens * model.experts_per_token * layout.expert_ranks / layout.tensor
        feed += routed * model.expert_inner * of_gate / layout.expert_ranks
        if model.expert_hidden:  # each token's shorter vector, and what its experts gave
            feed += 2 * tokens * model.expert_width * width
        if layout.expert > 1:  # of the fullest rank, and its tokens as they came
            between_experts = between * layout.expert_ranks / ranks if layout.is_sequence_parallel else 1
            feed += fullest * tokens * model.expert_width * width * model.experts_per_token / max(1.0, between_experts)
    if not scores or software.attention == "fused" or kind.mixer != "attention":
        return around + mixed + feed
    # softmax's result, dropout's result, and its mask
    pairs = layout.micro_batch * model.heads / ranks * (model.seq // layout.context) * kind.visible
    return around + mixed + feed + pairs * (2 * width + 1)


def _mixed_bytes(model: ModelShape, layout: Layout, software: Software, kind: LayerKind, *, saved: int) -> float:
    """Bytes of queries, keys, values and attention's result; or of what a state-space mixer's first product gives, and its result
    before and behind its norm: states are made again in the backward (mamba_ssm's fused kernel)."""
    width, ranks = number_bytes(software), layout.tensor
    tokens = layout.micro_batch * model.seq // layout.context
    if kind.mixer == "state" and model.state is not None:
        state = model.state
        first = 2 * state.inner + 2 * state.groups * state.size + state.heads
        return tokens * ((first + state.inner) * width + state.inner * saved) / ranks
    if kind.mixer == "none":
        return 0.0
    # keys and values that were gathered are kept whole
    of_keys = layout.micro_batch * model.seq if software.context_exchange == "gathered" else tokens
    queries = model.heads * (model.query_width + model.head_width)  # and attention's result
    if model.key_rank:
        keys = model.heads * (model.query_width + model.head_width)
        latent = tokens * (model.query_rank + model.key_rank + model.rope_dim) * width
    else:
        keys = (1 if model.shares_keys else 2) * model.key_heads * model.head_width
        latent = tokens * (model.query_rank + model.out_rank * model.out_groups) * width
    if kind.ratio and model.compressed is not None:  # of keys and their weights, before they become one
        latent += 2 * tokens * model.head_width * width * (2 if kind.ratio in model.compressed.indexed else 1)
    return (tokens * queries + of_keys * keys) * width / ranks + latent


def again_bytes(
    model: ModelShape, layout: Layout, software: Software, kind: LayerKind, *, imbalance: float = IMBALANCE
) -> float:
    """Bytes of the one layer that is computed again during its backward."""
    if layout.recompute == "none":
        return 0.0
    return _all_bytes(model, layout, software, kind, scores=True, imbalance=imbalance)
