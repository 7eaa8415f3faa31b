"""A bag-of-trigrams classifier that tells which page of the reference manual a line comes from."""

import argparse
import zlib
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from torch import nn


class BagOfTrigrams(nn.Module):
    def __init__(self, buckets, width, hidden, pages):
        super().__init__()
        self.embedding = nn.Embedding(buckets, width, sparse=True)
        self.layers = nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU())
        self.head = nn.Linear(hidden, pages)

    def forward(self, trigrams):
        bag = self.embedding(trigrams).mean(dim=1)
        return self.head(self.layers(bag))


def load_lines(buckets, length):
    """Hashed character trigrams of every long enough line, and the number of its page."""
    rows, labels = [], []
    for page, name in enumerate(sorted(topics)):
        for line in topics[name].splitlines():
            text = " ".join(line.split()).encode()
            if len(text) >= length + 2:
                rows.append([zlib.crc32(text[i : i + 3]) % buckets for i in range(length)])
                labels.append(page)
    return torch.tensor(rows), torch.tensor(labels)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--buckets", type=int, default=150_000)
    parser.add_argument("--width", type=int, default=48)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--length", type=int, default=40)
    parser.add_argument("--batch", type=int, default=192)
    parser.add_argument("--steps", type=int, default=500)
    args = parser.parse_args()

    torch.manual_seed(0)
    lines, pages = load_lines(args.buckets, args.length)
    model = BagOfTrigrams(args.buckets, args.width, args.hidden, len(topics))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for step in range(1, args.steps + 1):
        rows = torch.randint(len(lines), (args.batch,))
        loss = F.cross_entropy(model(lines[rows]), pages[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            print(f"step {step:3d}  loss {loss.item():.4f}")
    print(f"final loss {loss.item():.6f}")


if __name__ == "__main__":
    main()
