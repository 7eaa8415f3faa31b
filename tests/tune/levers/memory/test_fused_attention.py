from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import pytest
import torch
from tests.evidence_builder import EvidenceBuilder
from tests.lever_tools import found

from flatout.core.errors import EditError
from flatout.core.records.lever import Refusal
from flatout.tune.levers.memory.fused_attention import LEVER, edit

_HEAD: Final = """import math
import torch
import torch.nn as nn
import torch.nn.functional as F

"""

_NANO_GPT: Final = (
    _HEAD
    + """
class CausalSelfAttention(nn.Module):
    def __init__(self, n_embd=32, n_head=4, block_size=24, dropout=0.0):
        super().__init__()
        self.c_attn = nn.Linear(n_embd, 3 * n_embd)
        self.c_proj = nn.Linear(n_embd, n_embd)
        self.attn_dropout = nn.Dropout(dropout)
        self.n_head, self.n_embd = n_head, n_embd
        self.register_buffer("bias", torch.tril(torch.ones(block_size, block_size)).view(1, 1, block_size, block_size))

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)  # (B, nh, T, hs)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)

        # causal self-attention
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))
        att = F.softmax(att, dim=-1)
        att = self.attn_dropout(att)
        y = att @ v  # (B, nh, T, T) x (B, nh, T, hs) -> (B, nh, T, hs)
        y = y.transpose(1, 2).contiguous().view(B, T, C)
        return self.c_proj(y)


def run():
    torch.manual_seed(0)
    return CausalSelfAttention()(torch.randn(3, 17, 32))
"""
)

_HEAD_OF_A_LECTURE: Final = (
    _HEAD
    + """
class Head(nn.Module):
    def __init__(self, size=16):
        super().__init__()
        self.key = nn.Linear(32, size, bias=False)
        self.query = nn.Linear(32, size, bias=False)
        self.value = nn.Linear(32, size, bias=False)
        self.register_buffer("tril", torch.tril(torch.ones(64, 64)))

    def forward(self, x):
        B, T, C = x.shape
        k = self.key(x)
        q = self.query(x)
        wei = q @ k.transpose(-2, -1) * C**-0.5
        wei = wei.masked_fill(self.tril[:T, :T] == 0, float("-inf"))
        wei = F.softmax(wei, dim=-1)
        v = self.value(x)
        out = wei @ v
        return out


def run():
    torch.manual_seed(0)
    return Head()(torch.randn(3, 17, 32))
"""
)

_ANNOTATED: Final = (
    _HEAD
    + """
def attention(query, key, value, mask=None):
    d_k = query.size(-1)
    scores = torch.matmul(query, key.transpose(-2, -1)) / math.sqrt(d_k)
    if mask is not None:
        scores = scores.masked_fill(mask == 0, -1e9)
    p_attn = F.softmax(scores, dim=-1)
    return torch.matmul(p_attn, value)


def run():
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 4, 9, 8).unbind(0)
    mask = torch.rand(2, 1, 1, 9) > 0.3
    return attention(q, k, v) + attention(q, k, v, mask.long())
"""
)

_BERT: Final = (
    _HEAD
    + """
class BertSelfAttention(nn.Module):
    def __init__(self, hidden=32, heads=4):
        super().__init__()
        self.num_attention_heads = heads
        self.attention_head_size = hidden // heads
        self.query, self.key, self.value = (nn.Linear(hidden, hidden) for _ in range(3))

    def transpose_for_scores(self, x):
        return x.view(*x.size()[:-1], self.num_attention_heads, self.attention_head_size).permute(0, 2, 1, 3)

    def forward(self, hidden_states, attention_mask=None):
        query_layer = self.transpose_for_scores(self.query(hidden_states))
        key_layer = self.transpose_for_scores(self.key(hidden_states))
        value_layer = self.transpose_for_scores(self.value(hidden_states))
        attention_scores = torch.matmul(query_layer, key_layer.transpose(-1, -2))
        attention_scores = attention_scores / math.sqrt(self.attention_head_size)
        if attention_mask is not None:
            attention_scores = attention_scores + attention_mask
        attention_probs = nn.functional.softmax(attention_scores, dim=-1)
        context_layer = torch.matmul(attention_probs, value_layer)
        context_layer = context_layer.permute(0, 2, 1, 3).contiguous()
        return context_layer.view(*context_layer.size()[:-2], -1)


def run():
    torch.manual_seed(0)
    mask = (1.0 - (torch.rand(3, 1, 1, 17) > 0.2).double()) * -10000.0
    net, x = BertSelfAttention(), torch.randn(3, 17, 32)
    return net(x) + net(x, mask.to(x.dtype))
"""
)

_VIT: Final = (
    _HEAD
    + """
class Attention(nn.Module):
    def __init__(self, dim=32, num_heads=4):
        super().__init__()
        self.num_heads = num_heads
        self.scale = (dim // num_heads) ** -0.5
        self.qkv = nn.Linear(dim, dim * 3)
        self.attn_drop = nn.Dropout(0.0)

    def forward(self, x):
        B, N, C = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, self.num_heads, C // self.num_heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv[0], qkv[1], qkv[2]
        attn = (q @ k.transpose(-2, -1)) * self.scale
        attn = attn.softmax(dim=-1)
        attn = self.attn_drop(attn)
        x = (attn @ v).transpose(1, 2).reshape(B, N, C)
        return x


def run():
    torch.manual_seed(0)
    return Attention()(torch.randn(3, 17, 32))
"""
)

_ONE_LINE: Final = (
    _HEAD
    + """
class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(8, 8)
        self.tau = nn.Parameter(torch.tensor(0.7))

    def forward(self, q, k, v):
        return self.proj(torch.softmax((q / self.tau) @ k.mT, -1).to(q.dtype) @ v)


def run():
    torch.manual_seed(0)
    return Attention()(*torch.randn(3, 2, 4, 9, 8).unbind(0))
"""
)

_EINSUM: Final = (
    _HEAD
    + """
def attend(q, k, v, causal):
    scale = q.shape[-1] ** -0.5
    logits = torch.einsum(f"b i h d, b j h d -> b h i j", q, k)
    logits = logits * scale
    logits = torch.where(causal, logits, torch.finfo(logits.dtype).min)
    weights = F.softmax(logits, dim=-1, dtype=torch.float32).type_as(q)
    return torch.einsum("bhij,bjhd->bihd", weights, v)


def run():
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 9, 4, 8).unbind(0)
    return attend(q, k, v, torch.rand(9, 9) > 0.2)
"""
)

_BMM: Final = (
    _HEAD
    + """
def attend(q, k, v, bias):
    T = q.size(1)
    mask = torch.triu(torch.full((T, T), float("-inf")), diagonal=1)
    scores = torch.bmm(q, k.transpose(1, 2)) / q.size(-1) ** 0.5
    scores = scores + mask
    scores = scores - scores.max(dim=-1, keepdim=True).values
    probs = torch.softmax(scores, dim=2)
    return torch.bmm(probs, v).view(2, 4, T, -1)


def run():
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 8, 9, 8).unbind(0)
    return attend(q, k, v, None)
"""
)

_TWO_MASKS: Final = (
    _HEAD
    + """
def attend(q, k, v, pad, bias):
    T = q.shape[2]
    causal = torch.triu(torch.ones(T, T, dtype=torch.bool), diagonal=1)
    scores = torch.matmul(q, k.transpose(2, 3)) * 0.3
    scores = scores + bias
    scores = scores.masked_fill(causal, float("-inf"))
    scores.masked_fill_(pad[:, None, None, :], float("-inf"))
    return scores.softmax(-1).matmul(v)


def run():
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 4, 9, 8).unbind(0)
    pad = torch.zeros(2, 9, dtype=torch.bool)
    pad[:, 7:] = True
    return attend(q, k, v, pad, torch.randn(4, 9, 9).to(q.dtype))
"""
)

_EAGER: Final = (
    _HEAD
    + """
def attend(query, key, value, attention_mask, scaling):
    attn_weights = torch.matmul(query, key.transpose(2, 3)) * scaling
    if attention_mask is not None:
        causal_mask = attention_mask[:, :, :, : key.shape[-2]]
        attn_weights = attn_weights + causal_mask
    attn_weights = nn.functional.softmax(attn_weights, dim=-1, dtype=torch.float32).to(query.dtype)
    return torch.matmul(attn_weights, value)


def run():
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 4, 9, 8).unbind(0)
    mask = torch.zeros(2, 1, 9, 12, dtype=q.dtype).masked_fill(torch.rand(2, 1, 9, 12) > 0.8, -1e30)
    return attend(q, k, v, mask, 0.3) + attend(q, k, v, None, 0.3)
"""
)

_LISTS: Final = (
    _HEAD
    + """
def attend(q, k, v, mask):
    energy = torch.einsum("nqhd,nkhd->nhqk", [q, k])
    if mask is not None:
        energy = energy.masked_fill(mask == 0, float("-1e20"))
    attention = torch.softmax(energy / (64 ** (1 / 2)), dim=3)
    out = torch.einsum("nhql,nlhd->nqhd", [attention, v]).flatten(2)
    return out


def run():
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 9, 4, 8).unbind(0)
    return attend(q, k, v, None) + attend(q, k, v, torch.rand(2, 1, 1, 9) > 0.3)
"""
)

_OPTIONAL_CAUSAL: Final = (
    _HEAD
    + """
class Attention(nn.Module):
    def __init__(self, causal):
        super().__init__()
        self.causal = causal
        self.softmax = nn.Softmax(dim=-1)

    def forward(self, q, k, v):
        n = q.shape[-2]
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        if self.causal:
            scores = scores.masked_fill(torch.triu(torch.ones(n, n), diagonal=1).bool(), -torch.inf)
        return self.softmax(scores) @ v


def run():
    torch.manual_seed(0)
    inputs = torch.randn(3, 2, 4, 9, 8).unbind(0)
    return Attention(True)(*inputs) + Attention(False)(*inputs)
"""
)


class Case(NamedTuple):
    """A text, its function and the line of its softmax; what stands in the text after the edit, and what does not any more."""

    text: str
    function: str
    code: str
    after: str
    gone: tuple[str, ...] = ("softmax",)


CASES: Final = {
    "nanoGPT": Case(
        _NANO_GPT,
        "CausalSelfAttention.forward",
        "att = F.softmax(att, dim=-1)",
        "q, k, v, is_causal=True, dropout_p=self.attn_dropout.p if self.training else 0.0",
        ("softmax", "import math", "float("),
    ),
    "lecture": Case(
        _HEAD_OF_A_LECTURE,
        "Head.forward",
        "wei = F.softmax(wei, dim=-1)",
        "q.unsqueeze(1), k.unsqueeze(1), v.unsqueeze(1), is_causal=True, scale=C**-0.5",
    ),
    "annotated": Case(
        _ANNOTATED,
        "attention",
        "p_attn = F.softmax(scores, dim=-1)",
        "query, key, value, attn_mask=None if mask is None else mask != 0",
        ("d_k", "if mask is not None:"),
    ),
    "BERT": Case(
        _BERT,
        "BertSelfAttention.forward",
        "attention_probs = nn.functional.softmax(attention_scores, dim=-1)",
        "attn_mask=attention_mask",
    ),
    "ViT": Case(_VIT, "Attention.forward", "attn = attn.softmax(dim=-1)", "scale=self.scale"),
    "one line": Case(
        _ONE_LINE,
        "Attention.forward",
        "return self.proj(torch.softmax((q / self.tau) @ k.mT, -1).to(q.dtype) @ v)",
        "self.proj(F.scaled_dot_product_attention(q / self.tau, k, v, scale=1.0))",
    ),
    "einsum": Case(
        _EINSUM,
        "attend",
        "weights = F.softmax(logits, dim=-1, dtype=torch.float32).type_as(q)",
        "attn_mask=causal",
        ("softmax", "einsum"),
    ),
    "bmm": Case(_BMM, "attend", "probs = torch.softmax(scores, dim=2)", "is_causal=True", ("softmax", "triu")),
    "two masks": Case(
        _TWO_MASKS,
        "attend",
        "return scores.softmax(-1).matmul(v)",
        "attn_mask=bias.masked_fill(",
    ),
    "eager": Case(
        _EAGER,
        "attend",
        "attn_weights = nn.functional.softmax(attn_weights, dim=-1, dtype=torch.float32).to(query.dtype)",
        "attn_mask=None if attention_mask is None else attention_mask[:, :, :, : key.shape[-2]]",
    ),
    "lists": Case(
        _LISTS,
        "attend",
        "attention = torch.softmax(energy / (64 ** (1 / 2)), dim=3)",
        "attn_mask=None if mask is None else mask != 0",
        ("softmax", "einsum"),
    ),
    "optional": Case(
        _OPTIONAL_CAUSAL,
        "Attention.forward",
        "return self.softmax(scores) @ v",
        "F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)",
        ("triu",),
    ),
}


def _edited(case: Case) -> str:
    return edit(case.text, {"file": "model.py", "function": case.function, "code": case.code})


def _result(text: str, dtype: torch.dtype) -> Any:
    scope: dict[str, Any] = {"__name__": "model"}
    exec(compile(text, "model.py", "exec"), scope)
    run: Callable[[], torch.Tensor] = scope["run"]
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        return run().detach()
    finally:
        torch.set_default_dtype(before)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_attention_computes_the_same_with_one_call(case: Case) -> None:
    after = _edited(case)
    assert case.after in " ".join(after.split()), after
    for gone in case.gone:
        assert gone not in after.replace("self.softmax = nn.Softmax", ""), after
    # One of the texts has its softmax in float32.
    torch.testing.assert_close(_result(after, torch.float64), _result(case.text, torch.float64), rtol=1e-6, atol=1e-6)


def test_comments_and_lines_around_stay() -> None:
    after = _edited(CASES["nanoGPT"])
    assert "        # causal self-attention\n        y = F.scaled_dot_product_attention(" in after
    assert 'self.register_buffer("bias"' in after, "buffers stay, and with them the state dict"


_NEAR: Final = {
    "returned": (
        ("out = wei @ v\n        return out", "out = wei @ v\n        return out, wei"),
        "'wei' is used besides",
    ),
    "stored": (("out = wei @ v", "self.last = wei\n        out = wei @ v"), "'wei' is used besides"),
    "other axis": (("F.softmax(wei, dim=-1)", "F.softmax(wei, dim=1)"), "was recognised"),
    "soft cap": (("* C**-0.5", "* C**-0.5\n        wei = torch.tanh(wei)"), "was recognised"),
    "changed query": (("v = self.value(x)", "v = self.value(x)\n        q = q + 1"), "'q' is assigned again"),
}


@pytest.mark.parametrize(("change", "why"), _NEAR.values(), ids=_NEAR)
def test_what_a_kernel_would_change_is_refused(change: tuple[str, str], why: str) -> None:
    case = CASES["lecture"]
    text = case.text.replace(*change)
    code = next(line.strip() for line in text.splitlines() if "softmax" in line)
    with pytest.raises(EditError, match=why):
        edit(text, {"file": "model.py", "function": case.function, "code": code})


def test_a_window_that_does_not_start_at_the_first_key_is_no_causal_kernel() -> None:
    case = CASES["lecture"]
    after = _edited(case._replace(text=case.text.replace("self.tril[:T, :T]", "self.tril[T : 2 * T, :T]")))
    assert "attn_mask=self.tril[T : 2 * T, :T] != 0" in after
    assert "is_causal" not in after


def test_a_run_without_written_out_attention_is_refused() -> None:
    [refusal] = LEVER.propose(EvidenceBuilder().build(), ())
    assert isinstance(refusal, Refusal)


def test_a_finding_without_a_line_is_refused() -> None:
    [refusal] = LEVER.propose(EvidenceBuilder().build(), (found(0.01),))
    assert isinstance(refusal, Refusal)
