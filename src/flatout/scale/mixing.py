"""What mixes tokens in one layer, attention or a state-space mixer, without the products with its weights."""

from __future__ import annotations

from typing import Final, NamedTuple

from flatout.core.errors import PlanError
from flatout.machine.cost.collectives import gather_s
from flatout.machine.cost.roofline import peak_flop_per_s
from flatout.machine.cost.waves import Rates, product_s
from flatout.machine.specs.catalog import load_spec
from flatout.scale.case import StepCase
from flatout.scale.rates import rates_of
from flatout.scale.sizes import LayerKind, compressed_visible

_SOFTMAX_GROUP: Final = 4
"""Megatron's fused softmax takes attention whose samples x heads are a multiple of it (fused_kernels, batches_per_block)."""
_FUSED_BACKWARD: Final = 2.5
"""Times the forward's work: five products, as scores are made again, where the forward has two (the same, section 3.1)."""
_STATE_SHARE: Final = 0.64
"""Share of the memory's rate that programs reach, by the bytes of states as they are counted here: 2.6e12 B/s on an H200, where
others reach 4.1e12 (bench/results/2026-11-28-h200/state_space.json, four samples of 8192 tokens)."""
_STATE_BACKWARD: Final = 3.4
"""Times the forward's seconds (the same: 3.2 to 3.8)."""
_STATE_KERNELS: Final = 8
"""Kernels of a forward: the convolution, sums of steps, states of chunks, passing them on, products of pairs, the scan, the
norm."""
_FLOAT: Final = 4
_BLOCK: Final = 128
"""Keys that a kernel of fused attention takes at a time: of a window's ends, half a block on either side is for nothing."""


class MixingPass(NamedTuple):
    """Seconds of its products in both directions, bytes of scores that are read and written, whether the softmax is one
    kernel.
    """

    forward_s: float
    backward_s: float
    score_bytes: float
    is_fused: bool


def mixing(case: StepCase, rates: Rates, kind: LayerKind) -> MixingPass:
    """What mixes tokens, without the products with its weights."""
    if kind.mixer == "attention":
        return _attention(case, rates_of(case, case.product_dtype), kind)
    if kind.mixer == "state":
        return _states(case, rates)
    return MixingPass(0.0, 0.0, 0.0, True)


def _states(case: StepCase, rates: Rates) -> MixingPass:
    """A state-space mixer's convolution, its states in chunks, and its norm, by what they read and write (mamba_ssm's kernels of
    Mamba-2): each chunk's states, what goes from chunk to chunk, products within a chunk, and from states to tokens."""
    state, width = case.model.state, case.width
    if state is None:
        raise PlanError("a state-space mixer needs its sizes")
    shared = state.groups * state.size
    of_states = (
        4 * _FLOAT * state.inner * state.size / state.chunk
    )  # written, read, written as they are passed on, read
    of_chunks = 2 * _FLOAT * state.groups * state.chunk  # products of what goes in and out, of all pairs
    convolved = 2 * (state.inner + 2 * shared) * width
    read = (3 * state.inner + 4 * shared + 3 * state.inner) * width
    tokens = case.tokens / case.layout.tensor
    scanned_s = tokens * (read + of_states + of_chunks) / (_STATE_SHARE * rates.bytes_per_s)
    convolved_s = tokens * convolved / rates.bytes_per_s
    kernels_s = _STATE_KERNELS * rates.kernel_s
    return MixingPass(
        scanned_s + convolved_s + kernels_s, _STATE_BACKWARD * scanned_s + 2 * convolved_s + 2 * kernels_s, 0.0, True
    )


def _attention(case: StepCase, rates: Rates, kind: LayerKind) -> MixingPass:
    """What attention takes of one layer.

    Of contiguous pieces under a causal mask the last rank has the whole rows above its triangle: c - 1/2 squares of a piece's
    length where the mean is c/2, so (2c - 1) / c as much. Scores that are written are written whole, masked or not.
    """
    model, layout, software = case.model, case.layout, case.software
    groups = layout.micro_batch * model.heads // layout.tensor
    width, seq, context = model.head_width, model.seq, layout.context
    own = seq // context
    if software.attention == "fused":
        unequal = (2 * context - 1) / context if software.context_pieces == "contiguous" else 1.0
        # below the diagonal, and within the window
        visible = seq / 2 * unequal if kind.visible >= seq else min(seq / 2, kind.visible + _BLOCK)
        visible += compressed_visible(model, kind)
        flop = 2.0 * groups * own * visible * (model.query_width + width) + _index_flop(case, kind)
        peak = peak_flop_per_s(load_spec(case.cluster.device), case.product_dtype)
        forward_s = flop / (case.constants.attention_share * peak) + rates.kernel_s
        backward_s = _FUSED_BACKWARD * flop / (case.constants.attention_backward_share * peak) + rates.kernel_s
        return MixingPass(forward_s, backward_s, 0.0, True)
    size = case.width
    products_s = product_s(rates, own, seq, width, batch=groups, itemsize=size)
    products_s += product_s(rates, own, width, seq, batch=groups, itemsize=size)
    is_fused = software.attention == "megatron" and groups % _SOFTMAX_GROUP == 0
    return MixingPass(products_s, 2 * products_s, groups * own * seq * size * (4.5 if is_fused else 10.5), is_fused)


def _index_flop(case: StepCase, kind: LayerKind) -> float:
    """FLOP of the scores by which an indexer chooses compressed keys, forward."""
    keys = case.model.compressed
    if keys is None or kind.ratio not in keys.indexed:
        return 0.0
    return 2.0 * case.tokens / case.layout.tensor * case.model.seq / kind.ratio / 2 * keys.index_heads * keys.index_dim


def around_s_of(case: StepCase, attention: MixingPass) -> tuple[float, float]:
    """Seconds in which context ranks exchange keys and values, forward and backward, as far as attention does not hide them.

    Gathered before it, and the sum of their gradients scattered after it, nothing is hidden. In a ring keys and values go round
    beside attention, and backward once more with their gradients, beside twice its work.
    """
    model, layout = case.model, case.layout
    keys = (1 if model.shares_keys else 2) * model.key_heads * model.head_width
    numbers = model.key_rank + model.rope_dim if model.key_rank else keys / layout.tensor
    num_bytes = layout.micro_batch * model.seq * numbers * case.width
    once_s = gather_s(num_bytes, layout.context, case.tiers, stride=layout.tensor)
    if case.software.context_exchange == "gathered":
        return once_s, once_s
    return max(0.0, once_s - attention.forward_s), max(0.0, 2 * once_s - attention.backward_s)
