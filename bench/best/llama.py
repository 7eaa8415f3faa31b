"""The Llama-like model of examples/gpu/llama_naive.py as people train it who know how: bfloat16, torch.compile, fused attention.

    python bench/best/llama.py [--compile model|layers] [--attention sdpa|cudnn|flex|varlen] [--loss plain|liger] [--float8 ...]

The other options are the example's. The recipe is torchtitan's for one GPU: weights in float32, products in bfloat16, AdamW in
one kernel, each layer (or the model) compiled. `--loss liger` takes the head and its loss from Liger kernels
(`LigerFusedLinearCrossEntropyLoss`). `--float8` has torchao take the layers' products in 8 bits. With `--documents`, 'flex' is
FlexAttention with `create_block_mask`, and 'varlen' FlashAttention over sequences of different lengths (torch's `varlen_attn`),
with the same documents in the same rows. Weights and draws are those of the example.
"""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "gpu"))

import llama_naive as example


class Attention(nn.Module):
    """The example's attention with another kernel; `kind` as in the script's options."""

    def __init__(self, plain: example.Attention, kind: str) -> None:
        super().__init__()
        self.plain, self.kind = plain, kind

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Any) -> Tensor:
        own = self.plain
        B, T, C = x.shape
        q = own.wq(x).view(B, T, own.heads, own.size)
        k = own.wk(x).view(B, T, own.kv_heads, own.size)
        v = own.wv(x).view(B, T, own.kv_heads, own.size)
        cos, sin = (
            cos.transpose(-3, -2) if cos.dim() > 2 else cos[:, None],
            sin.transpose(-3, -2) if sin.dim() > 2 else sin[:, None],
        )
        q, k = example.rotate(q, cos, sin).to(v.dtype), example.rotate(k, cos, sin).to(v.dtype)
        if self.kind == "varlen":
            from torch.nn.attention.varlen import varlen_attn

            starts, longest = mask
            k, v = (part.repeat_interleave(own.heads // own.kv_heads, dim=2) for part in (k, v))
            q, k, v = (part.reshape(B * T, own.heads, own.size) for part in (q, k, v))
            y = varlen_attn(q, k, v, starts, starts, longest, longest, **causal(varlen_attn))
            return own.wo(y.reshape(B, T, C))
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        if self.kind == "flex":
            from torch.nn.attention.flex_attention import flex_attention

            y = flex_attention(q, k, v, block_mask=mask, enable_gqa=True)
        else:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return own.wo(y.transpose(1, 2).reshape(B, T, C))


def causal(varlen_attn: Any) -> dict[str, Any]:
    """How this version of torch is told to attend to what came before: torch 2.10 has `is_causal`, later ones a window."""
    has_window = "window_size" in inspect.signature(varlen_attn).parameters
    return {"window_size": (-1, 0)} if has_window else {"is_causal": True}


class WithLoss(nn.Module):
    """The example's model with another head and loss; `loss` None for the example's own."""

    def __init__(self, plain: example.Llama, loss: nn.Module | None) -> None:
        super().__init__()
        self.plain, self.loss = plain, loss

    def forward(self, tokens: Tensor, targets: Tensor, places: Tensor | None, mask: Any) -> Tensor:
        own = self.plain
        x = own.embedding(tokens)
        cos, sin = own.cos[: tokens.size(1)], own.sin[: tokens.size(1)]
        if places is not None:
            cos, sin = own.cos[places][:, None], own.sin[places][:, None]
        for block in own.blocks:
            x = block(x, cos, sin, mask)
        x = own.norm(x)
        if self.loss is not None:
            return self.loss(
                own.head.weight.to(torch.bfloat16), x.flatten(0, 1).to(torch.bfloat16), targets.reshape(-1)
            )
        logits = own.head(x)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.reshape(-1))


def mask_of(kind: str, numbers: Tensor) -> Any:
    """What the kernel needs to keep each document to itself."""
    if kind == "flex":
        from torch.nn.attention.flex_attention import create_block_mask

        def allowed(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return (numbers[b, q] == numbers[b, k]) & (q >= k)

        B, T = numbers.shape
        return create_block_mask(allowed, B, None, T, T, device=numbers.device, _compile=numbers.is_cuda)
    flat = numbers + torch.arange(len(numbers), device=numbers.device)[:, None] * (int(numbers.max()) + 1)
    flat = flat.flatten()
    begins = torch.nonzero(flat[1:] != flat[:-1])[:, 0] + 1
    ends = torch.tensor([len(flat)], device=flat.device)
    starts = torch.cat([torch.zeros_like(ends), begins, ends]).to(torch.int32)
    return starts, int((starts[1:] - starts[:-1]).max())


def main() -> None:
    parser = example.parse(__doc__)
    parser.add_argument("--compile", choices=("model", "layers", "none"), default="model")
    parser.add_argument("--attention", choices=("sdpa", "cudnn", "flex", "varlen"), default="sdpa")
    parser.add_argument("--loss", choices=("plain", "liger"), default="plain")
    parser.add_argument(
        "--float8", choices=("", "tensorwise", "rowwise"), default="", help="products of layers by torchao"
    )
    parser.add_argument("--autotune", action="store_true", help="torch.compile's max-autotune-no-cudagraphs")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    documents = example.read_documents()
    tokens = torch.cat(documents).to(device)
    sizes = (args.width, args.heads, args.kv_heads, args.inner, args.layers, args.context)
    plain = example.Llama(args.vocab, *sizes).to(device)
    if args.attention == "cudnn":
        from torch.nn.attention import SDPBackend, sdpa_kernel

        context: Any = sdpa_kernel(SDPBackend.CUDNN_ATTENTION)
        context.__enter__()
    for block in plain.blocks:
        block.attention = Attention(block.attention, args.attention)
    if args.float8:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        recipe = Float8LinearConfig.from_recipe_name(args.float8)
        convert_to_float8_training(plain, config=recipe, module_filter_fn=lambda _, name: not name.endswith("head"))
    loss_of = None
    if args.loss == "liger":
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

        loss_of = LigerFusedLinearCrossEntropyLoss()
    model: nn.Module = WithLoss(plain, loss_of)
    mode = "max-autotune-no-cudagraphs" if args.autotune else None
    if args.compile == "layers":
        for block in plain.blocks:
            block.compile(mode=mode)
    elif args.compile == "model":
        model.compile(mode=mode)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=3e-4, fused=True)
    offsets = torch.arange(args.context + 1, device=device)
    generator = torch.Generator().manual_seed(1)
    for step in range(1, args.steps + 1):
        places = mask = None
        if args.documents:
            packed = example.pack(documents, args.batch, args.context, generator)
            rows, numbers, places = (part.to(device, non_blocking=True) for part in packed)
            places, mask = places[:, :-1], mask_of(args.attention, numbers[:, :-1])
        else:
            starts = torch.randint(len(tokens) - args.context - 1, (args.batch,)).to(device, non_blocking=True)
            rows = tokens[starts[:, None] + offsets]
        with torch.autocast(device, torch.bfloat16):
            loss = model(rows[:, :-1], rows[:, 1:], places, mask)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            print(f"step {step:5d}  loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
