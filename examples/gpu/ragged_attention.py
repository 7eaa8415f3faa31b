"""A small language model that learns sentences of any length, each batch padded to its longest. On a CPU it is a toy."""

import argparse
import random

import torch
import torch.nn.functional as F
from torch import nn

PAD = 0


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(B, T, 3, self.heads, C // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(B, T, C))
        return x + self.mlp(self.norm2(x))


class LanguageModel(nn.Module):
    def __init__(self, vocab, width, heads, layers):
        super().__init__()
        self.token = nn.Embedding(vocab, width, padding_idx=PAD)
        self.blocks = nn.ModuleList([Block(width, heads) for _ in range(layers)])
        self.head = nn.Linear(width, vocab, bias=False)

    def forward(self, tokens):
        x = self.token(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def sentence(vocab, longest):
    return torch.randint(1, vocab, (random.randint(longest // 20, longest),))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--batch", type=int, default=None)
    args = parser.parse_args()
    torch.manual_seed(0)
    random.seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    vocab, width, heads, layers, longest = (8192, 768, 12, 6, 2000) if device == "cuda" else (512, 64, 4, 2, 60)
    batch = args.batch or (8 if device == "cuda" else 4)
    model = LanguageModel(vocab, width, heads, layers).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    for step in range(args.steps):
        sentences = [sentence(vocab, longest) for _ in range(batch)]
        tokens = nn.utils.rnn.pad_sequence(sentences, batch_first=True, padding_value=PAD).to(device)
        with torch.autocast(device, torch.bfloat16):
            logits = model(tokens[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), ignore_index=PAD)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            print(f"step {step}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
