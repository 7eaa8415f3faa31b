"""Calls scaled_dot_product_attention as the script did, against the same call with one argument changed."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor
from torch.nn import functional as F

from flatout.check.trials.context import Scene, TrialEntry, query_key_value
from flatout.check.trials.timing import timed_passes
from flatout.core.records.trial import TimeAttentionCall, TrialResult


def run(trial: TimeAttentionCall, scene: Scene) -> TrialResult:
    """Times scaled_dot_product_attention as called, and with one argument changed."""
    # B batch, N heads, Q query tokens, K key tokens, D head dim
    q, k, v = query_key_value(trial, scene)
    mask = None
    if trial.masked:
        visible = torch.ones(trial.q_len, trial.kv_len, dtype=torch.bool, device=scene.device)
        visible = visible.tril() if trial.cure != "no-mask" else visible
        mask = torch.zeros(visible.shape, dtype=q.dtype, device=scene.device).masked_fill_(~visible, float("-inf"))
    cured_mask = mask if trial.cure == "no-dropout" else None
    cured_dropout = 0.0 if trial.cure == "no-dropout" else trial.dropout

    def now() -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=trial.dropout)

    def cured() -> Tensor:
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=cured_mask, dropout_p=cured_dropout, is_causal=trial.cure == "causal"
        )

    return timed_passes(trial, now, cured, scene, inputs=(q, k, v), backward=trial.backward)


TRIAL: Final = TrialEntry(TimeAttentionCall, run)
