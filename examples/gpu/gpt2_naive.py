"""GPT-2 small as a first version is written: float32, attention by hand, the loss read in every step, 50257 tokens.

On a CPU it is a toy, so that the script can be tried anywhere.
"""

import argparse
import math
import re
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from torch import nn


class CausalSelfAttention(nn.Module):
    def __init__(self, width, heads, context):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.register_buffer("mask", torch.tril(torch.ones(context, context)).view(1, 1, context, context))

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = self.qkv(x).split(C, dim=2)
        q = q.view(B, T, self.heads, C // self.heads).transpose(1, 2)
        k = k.view(B, T, self.heads, C // self.heads).transpose(1, 2)
        v = v.view(B, T, self.heads, C // self.heads).transpose(1, 2)
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.mask[:, :, :T, :T] == 0, float("-inf"))
        att = F.softmax(att, dim=-1)
        y = att @ v
        y = y.transpose(1, 2).contiguous().view(B, T, C)
        return self.proj(y)


class Block(nn.Module):
    def __init__(self, width, heads, context):
        super().__init__()
        self.ln1 = nn.LayerNorm(width)
        self.attn = CausalSelfAttention(width, heads, context)
        self.ln2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        x = x + self.attn(self.ln1(x))
        return x + self.mlp(self.ln2(x))


class GPT(nn.Module):
    def __init__(self, vocab, width, heads, layers, context):
        super().__init__()
        self.wte = nn.Embedding(vocab, width)
        self.wpe = nn.Embedding(context, width)
        self.blocks = nn.ModuleList([Block(width, heads, context) for _ in range(layers)])
        self.ln = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        self.apply(self.init)
        self.head.weight = self.wte.weight

    def init(self, module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, idx, targets):
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1), device=idx.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.ln(x))
        return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.reshape(-1))


def read_tokens():
    """Words, spaces and signs of the Python manual, numbered by first appearance."""
    pieces = re.findall(r" ?[A-Za-z]+| ?[0-9]+|\s+|.", "".join(topics[name] for name in sorted(topics)))
    index = {}
    return torch.tensor([index.setdefault(piece, len(index)) for piece in pieces])


def main():
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=12 if on_gpu else 2)
    parser.add_argument("--width", type=int, default=768 if on_gpu else 64)
    parser.add_argument("--heads", type=int, default=12 if on_gpu else 4)
    parser.add_argument("--context", type=int, default=1024 if on_gpu else 128)
    parser.add_argument("--batch", type=int, default=8 if on_gpu else 4)
    parser.add_argument("--vocab", type=int, default=50257 if on_gpu else 9001)
    parser.add_argument("--steps", type=int, default=2000)
    args = parser.parse_args()
    device = "cuda" if on_gpu else "cpu"

    torch.manual_seed(0)
    tokens = read_tokens().to(device)
    model = GPT(args.vocab, args.width, args.heads, args.layers, args.context).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    offsets = torch.arange(args.context + 1, device=device)
    losses = []
    for step in range(1, args.steps + 1):
        starts = torch.randint(len(tokens) - args.context - 1, (args.batch,)).to(device)
        window = tokens[starts[:, None] + offsets]
        loss = model(window[:, :-1], window[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % 100 == 0:
            print(f"step {step:5d}  loss {sum(losses[-100:]) / 100:.4f}")


if __name__ == "__main__":
    main()
