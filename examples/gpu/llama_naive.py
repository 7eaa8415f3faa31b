"""A Llama-like model of 1 billion weights as a first version is written: float32, norms and rotary turns by hand, a plain loop.

`--documents` packs whole pages of the Python manual into each row, and a mask of every row keeps attention inside of each page.
On a CPU it is a toy, so that the script can be tried anywhere.
"""

import argparse
import re
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from torch import nn


class RMSNorm(nn.Module):
    def __init__(self, width, eps=1e-5):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x):
        norm = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)
        return norm.type_as(x) * self.weight


def rotate(x, cos, sin):
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)


class Attention(nn.Module):
    def __init__(self, width, heads, kv_heads):
        super().__init__()
        self.heads, self.kv_heads, self.size = heads, kv_heads, width // heads
        self.wq = nn.Linear(width, width, bias=False)
        self.wk = nn.Linear(width, kv_heads * self.size, bias=False)
        self.wv = nn.Linear(width, kv_heads * self.size, bias=False)
        self.wo = nn.Linear(width, width, bias=False)

    def forward(self, x, cos, sin, mask):
        B, T, C = x.shape
        q = self.wq(x).view(B, T, self.heads, self.size).transpose(1, 2)
        k = self.wk(x).view(B, T, self.kv_heads, self.size).transpose(1, 2)
        v = self.wv(x).view(B, T, self.kv_heads, self.size).transpose(1, 2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        k = k.repeat_interleave(self.heads // self.kv_heads, dim=1)
        v = v.repeat_interleave(self.heads // self.kv_heads, dim=1)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        return self.wo(y.transpose(1, 2).reshape(B, T, C))


class FeedForward(nn.Module):
    def __init__(self, width, inner):
        super().__init__()
        self.w1 = nn.Linear(width, inner, bias=False)
        self.w2 = nn.Linear(inner, width, bias=False)
        self.w3 = nn.Linear(width, inner, bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, width, heads, kv_heads, inner):
        super().__init__()
        self.norm1, self.norm2 = RMSNorm(width), RMSNorm(width)
        self.attention = Attention(width, heads, kv_heads)
        self.feed_forward = FeedForward(width, inner)

    def forward(self, x, cos, sin, mask):
        x = x + self.attention(self.norm1(x), cos, sin, mask)
        return x + self.feed_forward(self.norm2(x))


class Llama(nn.Module):
    def __init__(self, vocab, width, heads, kv_heads, inner, layers, context):
        super().__init__()
        self.embedding = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList([Block(width, heads, kv_heads, inner) for _ in range(layers)])
        self.norm = RMSNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        size = width // heads
        angles = torch.outer(torch.arange(context), 5e5 ** -(torch.arange(0, size, 2) / size))
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens, targets, places=None, mask=None):
        x = self.embedding(tokens)
        cos, sin = self.cos[: tokens.size(1)], self.sin[: tokens.size(1)]
        if places is not None:  # each document begins at place 0
            cos, sin = self.cos[places][:, None], self.sin[places][:, None]
        for block in self.blocks:
            x = block(x, cos, sin, mask)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.view(-1, logits.size(-1)).float(), targets.reshape(-1))


def read_documents():
    """The pages of the Python manual as numbers of words, spaces and signs, in the order in which these first appear."""
    index = {}
    pages = [re.findall(r" ?[A-Za-z]+| ?[0-9]+|\s+|.", topics[name]) for name in sorted(topics)]
    return [torch.tensor([index.setdefault(piece, len(index)) for piece in page]) for page in pages]


def pack(documents, batch, context, generator):
    """Rows of whole documents, one after the other until a row is full: tokens, and of each its document and its place there."""
    rows = []
    for _ in range(batch):
        tokens, numbers, places, number = [], [], [], 0
        while sum(map(len, tokens)) < context + 1:
            document = documents[int(torch.randint(len(documents), (), generator=generator))]
            tokens.append(document)
            numbers.append(torch.full((len(document),), number))
            places.append(torch.arange(len(document)) % context)
            number += 1
        rows.append([torch.cat(parts)[: context + 1] for parts in (tokens, numbers, places)])
    return [torch.stack(parts) for parts in zip(*rows)]


def parse(doc):
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=doc)
    parser.add_argument("--layers", type=int, default=16 if on_gpu else 2)
    parser.add_argument("--width", type=int, default=2048 if on_gpu else 64)
    parser.add_argument("--heads", type=int, default=32 if on_gpu else 4)
    parser.add_argument("--kv-heads", type=int, default=8 if on_gpu else 2)
    parser.add_argument("--inner", type=int, default=8192 if on_gpu else 192)
    parser.add_argument("--context", type=int, default=4096 if on_gpu else 128)
    parser.add_argument("--batch", type=int, default=4 if on_gpu else 2)
    parser.add_argument("--vocab", type=int, default=32768 if on_gpu else 9001)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--documents", action="store_true")
    return parser


def main():
    args = parse(__doc__).parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    documents = read_documents()
    tokens = torch.cat(documents).to(device)
    sizes = (args.width, args.heads, args.kv_heads, args.inner, args.layers, args.context)
    model = Llama(args.vocab, *sizes).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    offsets = torch.arange(args.context + 1, device=device)
    generator = torch.Generator().manual_seed(1)
    causal = torch.ones(args.context, args.context, dtype=torch.bool, device=device).tril()
    for step in range(1, args.steps + 1):
        if args.documents:
            rows, numbers, places = (part.to(device) for part in pack(documents, args.batch, args.context, generator))
            mask = (numbers[:, :-1, None] == numbers[:, None, :-1]) & causal
            loss = model(rows[:, :-1], rows[:, 1:], places[:, :-1], mask[:, None])
        else:
            starts = torch.randint(len(tokens) - args.context - 1, (args.batch,)).to(device)
            rows = tokens[starts[:, None] + offsets]
            loss = model(rows[:, :-1], rows[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            print(f"step {step:5d}  loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
