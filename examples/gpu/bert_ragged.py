"""A BERT-like encoder that tells which page of the Python manual a passage of any length is from.

Passages are padded to the longest that may come, and the attention is written out. On a CPU it is a toy.
"""

import argparse
import math
import zlib
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from torch import nn

PAD = 0


class SelfAttention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.out = nn.Linear(width, width)

    def forward(self, x, mask):
        B, T, C = x.shape
        q = self.query(x).view(B, T, self.heads, -1).transpose(1, 2)
        k = self.key(x).view(B, T, self.heads, -1).transpose(1, 2)
        v = self.value(x).view(B, T, self.heads, -1).transpose(1, 2)
        scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(C // self.heads)
        scores = scores + mask
        weights = F.softmax(scores, dim=-1)
        mixed = torch.matmul(weights, v)
        return self.out(mixed.transpose(1, 2).reshape(B, T, C))


class Layer(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.attention = SelfAttention(width, heads)
        self.norm1 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.norm2 = nn.LayerNorm(width)

    def forward(self, x, mask):
        x = self.norm1(x + self.attention(x, mask))
        return self.norm2(x + self.mlp(x))


class Encoder(nn.Module):
    def __init__(self, vocab, width, heads, layers, longest, classes):
        super().__init__()
        self.token = nn.Embedding(vocab, width, padding_idx=PAD)
        self.position = nn.Embedding(longest, width)
        self.layers = nn.ModuleList([Layer(width, heads) for _ in range(layers)])
        self.head = nn.Linear(width, classes)

    def forward(self, tokens):
        mask = torch.zeros_like(tokens, dtype=torch.float32).masked_fill(tokens == PAD, -1e4)[:, None, None, :]
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for layer in self.layers:
            x = layer(x, mask)
        return self.head(x[:, 0])


def passages(longest, vocab, generator):
    """Words as numbers, in passages whose lengths are log-normal, and the number of their page."""
    names = sorted(topics, key=lambda name: -len(topics[name]))[:16]
    found = []
    for label, name in enumerate(names):
        words = [1 + zlib.crc32(word.encode()) % (vocab - 1) for word in topics[name].split()]
        start = 0
        while start < len(words) - 8:
            drawn = float(torch.empty(1).log_normal_(math.log(longest / 5), 0.6, generator=generator))
            length = min(longest, max(8, int(drawn)))
            found.append((torch.tensor(words[start : start + length]), label))
            start += max(4, length // 4)
    return found


def main():
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=12 if on_gpu else 2)
    parser.add_argument("--width", type=int, default=768 if on_gpu else 64)
    parser.add_argument("--longest", type=int, default=512 if on_gpu else 96)
    parser.add_argument("--batch", type=int, default=32 if on_gpu else 8)
    parser.add_argument("--steps", type=int, default=3000)
    args = parser.parse_args()
    device = "cuda" if on_gpu else "cpu"

    torch.manual_seed(0)
    data = passages(args.longest, 30522, torch.Generator().manual_seed(1))
    model = Encoder(30522, args.width, args.width // 64, args.layers, args.longest, 16).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for step in range(1, args.steps + 1):
        rows = torch.randint(len(data), (args.batch,)).tolist()
        tokens = torch.full((args.batch, args.longest), PAD)
        for place, row in enumerate(rows):
            tokens[place, : len(data[row][0])] = data[row][0]
        labels = torch.tensor([data[row][1] for row in rows])
        loss = F.cross_entropy(model(tokens.to(device)), labels.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 100 == 0:
            print(f"step {step:5d}  loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
