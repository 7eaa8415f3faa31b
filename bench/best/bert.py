"""The encoder of examples/gpu/bert_ragged.py as people train it who know how: bfloat16, torch.compile, little or no padding.

    python bench/best/bert.py [--way groups|varlen] [options of the example]

'groups' is what transformers' Trainer does with `group_by_length`, bf16 and torch_compile: batches of like lengths (its sampler:
chunks of 50 batches, sorted), padded to their longest rounded up to 8, attention in one kernel with a mask. 'varlen' packs the
passages of a batch one behind the other, with FlashAttention over sequences of different lengths (torch's `varlen_attn`); rows
that fill up to a multiple of 256 belong to a passage of their own. Sizes and passages are those of the example.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "gpu"))

import bert_ragged as example

ROUNDED = 256


class Attention(nn.Module):
    """The example's attention in one kernel; `spans` is a mask, or where sequences begin and the longest's length."""

    def __init__(self, plain: example.SelfAttention) -> None:
        super().__init__()
        self.plain = plain

    def forward(self, x: Tensor, spans: Any) -> Tensor:
        own = self.plain
        width = x.shape[-1]
        q, k, v = own.query(x), own.key(x), own.value(x)
        if isinstance(spans, tuple):
            from torch.nn.attention.varlen import varlen_attn

            starts, longest = spans
            q, k, v = (part.view(-1, own.heads, width // own.heads) for part in (q, k, v))
            return own.out(varlen_attn(q, k, v, starts, starts, longest, longest).reshape(-1, width))
        B, T, _ = x.shape
        q, k, v = (part.view(B, T, own.heads, -1).transpose(1, 2) for part in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=spans)
        return own.out(y.transpose(1, 2).reshape(B, T, width))


class Encoder(nn.Module):
    """The example's encoder on tokens whose places, spans and first rows are handed in."""

    def __init__(self, plain: example.Encoder) -> None:
        super().__init__()
        self.plain = plain
        for layer in plain.layers:
            layer.attention = Attention(layer.attention)

    def forward(self, tokens: Tensor, places: Tensor, spans: Any, firsts: Tensor | None) -> Tensor:
        x = self.plain.token(tokens) + self.plain.position(places)
        for layer in self.plain.layers:
            x = layer(x, spans)
        return self.plain.head(x[firsts] if firsts is not None else x[:, 0])


def grouped(lengths: list[int], batch: int) -> Iterator[list[int]]:
    """Batches of like lengths without end: chunks of 50 batches in a random order, each sorted, as transformers' sampler."""
    while True:
        order = torch.randperm(len(lengths)).tolist()
        chunk = batch * 50
        order = [
            i
            for start in range(0, len(order), chunk)
            for i in sorted(order[start : start + chunk], key=lambda i: -lengths[i])
        ]
        batches = [order[start : start + batch] for start in range(0, len(order) - batch + 1, batch)]
        yield from batches


def main() -> None:
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12 if on_gpu else 2)
    parser.add_argument("--width", type=int, default=768 if on_gpu else 64)
    parser.add_argument("--longest", type=int, default=512 if on_gpu else 96)
    parser.add_argument("--batch", type=int, default=32 if on_gpu else 8)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--way", choices=("groups", "varlen"), default="groups")
    args = parser.parse_args()
    device = "cuda" if on_gpu else "cpu"
    torch.manual_seed(0)
    data = example.passages(args.longest, 30522, torch.Generator().manual_seed(1))
    plain = example.Encoder(30522, args.width, args.width // 64, args.layers, args.longest, 16)
    model = Encoder(plain).to(device)
    compiled = torch.compile(model, dynamic=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    batches = grouped([len(words) for words, _ in data], args.batch)
    for step in range(1, args.steps + 1):
        rows = next(batches) if args.way == "groups" else torch.randint(len(data), (args.batch,)).tolist()
        words = [data[row][0] for row in rows]
        labels = torch.tensor([data[row][1] for row in rows]).to(device, non_blocking=True)
        lengths = torch.tensor([len(one) for one in words])
        spans: Any
        firsts = None
        if args.way == "groups":
            tokens = nn.utils.rnn.pad_sequence(words, batch_first=True, padding_value=example.PAD)
            tokens = F.pad(tokens, (0, -tokens.shape[1] % 8), value=example.PAD)
            places = torch.arange(tokens.shape[1])
            spans = (tokens != example.PAD)[:, None, None, :].to(device, non_blocking=True)
        else:
            filling = -int(lengths.sum()) % ROUNDED
            tokens = F.pad(torch.cat(words), (0, filling), value=example.PAD)
            places = torch.cat([torch.arange(len(one)) for one in words] + [torch.arange(filling) % args.longest])
            cuts = [0, *lengths.cumsum(0).tolist()]
            cuts += [min(cut + args.longest, len(tokens)) for cut in range(cuts[-1], len(tokens), args.longest)]
            spans = (torch.tensor(cuts, dtype=torch.int32).to(device, non_blocking=True), args.longest)
            firsts = torch.tensor(cuts[: args.batch]).to(device, non_blocking=True)
        tokens, places = tokens.to(device, non_blocking=True), places.to(device, non_blocking=True)
        with torch.autocast(device, torch.bfloat16):
            loss = F.cross_entropy(compiled(tokens, places, spans, firsts).float(), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 100 == 0:
            print(f"step {step:5d}  loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
