"""What flatout's own executor in mixed precision is for the planner."""

from __future__ import annotations

from typing import Final

from flatout.core.records.scale import Software

EXECUTOR: Final = Software(
    gradient_bytes=4,
    state_bytes=12,
    optimizer_bytes=28,
    forward_operators=17,
    recompute_operators=20,
    stops_early=True,
    end_operators=20,
    update_operators=0.3,
    reduce_operators=2.0,
    divided_by="tensors",
    shards_by="weight",
    has_dropout=False,
    fuses_gate=False,
    autocast_alone=True,
    loss_bytes=10,
)
"""FSDP2 and DTensor, gradients and weights in float32, AdamW in one kernel (reads weight, gradient, two moments; writes three).

Plain layers without dropout, and torch's cross-entropy in float32: its log-softmax, that one's gradient and the logits' are there
at once, as the logits in half precision go when theirs come.

Operators are counted by what a host takes for a step without arithmetic (a profile on a CPU, 70 us an operator): 3.5 ms for a
layer and micro-batch, 1.6 ms more where attention is recomputed, 1.5 ms for embedding, head and loss. Operators of a forward, and
what an update takes for each weight of an operator on tensors that know how they are divided, fit 25 layouts on two H200 best,
each measured in five visits (bench/results/2026-11-28-h200-x2). What reducing a weight's gradient takes of the host
(cast, copied into the buffer that is sent, the send itself, copied out) fits the means of two rounds in five visits best, from 16
to 25 layouts each (two of that folder, three of 2026-11-29-h200-x2).
"""
