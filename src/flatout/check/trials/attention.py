"""Attention written out, against scaled_dot_product_attention at the same shapes."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor
from torch.nn import functional as F

from flatout.check.trials.context import Scene, TrialEntry, query_key_value
from flatout.check.trials.timing import largest_relative_error, timed_passes
from flatout.core.records.trial import TimeAttention, TrialResult


def run(trial: TimeAttention, scene: Scene) -> TrialResult:
    """Times softmax(q k^T) v written out, against scaled_dot_product_attention."""
    # B batch, N heads, Q query tokens, K key tokens, D head dim
    q, k, v = query_key_value(trial, scene)
    mask = None
    if trial.causal or trial.masked:
        mask = torch.ones(trial.q_len, trial.kv_len, dtype=torch.bool, device=scene.device).tril()

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
        error = largest_relative_error(written_out, fused)
    return timed_passes(trial, written_out, fused, scene, inputs=(q, k, v), backward=trial.backward, error=error)


TRIAL: Final = TrialEntry(TimeAttention, run)
