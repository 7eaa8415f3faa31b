"""A small transformer that guesses the chapter of a paragraph of the Python reference."""

import re
from collections import Counter
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from torch import nn

MAX_WORDS = 256
VOCAB = 2000
WIDTH = 64
BATCH = 16
STEPS = 100
PAD, UNKNOWN = 0, 1


def read_paragraphs():
    """Word lists of all paragraphs that have at least eight words, with their chapter."""
    paragraphs, labels = [], []
    for label, name in enumerate(sorted(topics)):
        for paragraph in topics[name].split("\n\n"):
            words = re.findall(r"[A-Za-z_]+|[^\sA-Za-z_]", paragraph)
            if len(words) >= 8:
                paragraphs.append(words[:MAX_WORDS])
                labels.append(label)
    return paragraphs, labels


class ParagraphData:
    def __init__(self):
        paragraphs, labels = read_paragraphs()
        counts = Counter(word for words in paragraphs for word in words)
        index = {word: i + 2 for i, (word, _) in enumerate(counts.most_common(VOCAB - 2))}
        self.ids = [torch.tensor([index.get(word, UNKNOWN) for word in words]) for words in paragraphs]
        self.labels = torch.tensor(labels)

    def batch(self, size):
        rows = torch.randint(len(self.ids), (size,))
        longest = max(len(self.ids[row]) for row in rows.tolist())
        tokens = torch.full((size, longest), PAD)
        for slot, row in enumerate(rows.tolist()):
            tokens[slot, : len(self.ids[row])] = self.ids[row]
        return tokens, self.labels[rows]


class Layer(nn.Module):
    def __init__(self, heads=4):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x, is_word):
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=is_word[:, None, None, :])
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class ParagraphClassifier(nn.Module):
    def __init__(self, num_topics, depth=2):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.position = nn.Parameter(0.02 * torch.randn(MAX_WORDS, WIDTH))
        self.layers = nn.ModuleList([Layer() for _ in range(depth)])
        self.head = nn.Linear(WIDTH, num_topics)

    def forward(self, tokens):
        is_word = tokens != PAD
        x = self.embed(tokens) + self.position[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x, is_word)
        weight = is_word.float().unsqueeze(-1)
        return self.head((x * weight).sum(dim=1) / weight.sum(dim=1))


def main():
    torch.manual_seed(0)
    data = ParagraphData()
    model = ParagraphClassifier(len(topics))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    for step in range(STEPS):
        tokens, labels = data.batch(BATCH)
        loss = F.cross_entropy(model(tokens), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 25 == 0:
            print(f"step {step}: loss {loss.item():.4f}")
    print(f"final loss {loss.item():.6f}")


if __name__ == "__main__":
    main()
