"""Which chapter of the Python reference does a passage come from?

A bag of words and word pairs, hashed into buckets, then a two-layer classifier.
"""

import argparse
import random
import re
import zlib
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

BUCKETS = 8192
WORD = re.compile(r"[a-z_]+")


def bucket_ids(passage):
    """Bucket numbers of the words and the word pairs of a passage."""
    words = WORD.findall(passage.lower())
    pairs = [first + " " + second for first, second in zip(words, words[1:])]
    return [zlib.crc32(gram.encode()) % BUCKETS for gram in words + pairs]


class Passages(Dataset):
    def __init__(self, length=1200, stride=150):
        self.passages = []
        for label, name in enumerate(sorted(topics)):
            text = topics[name]
            for start in range(0, max(1, len(text) - length), stride):
                self.passages.append((text[start : start + length], label))
        self.num_topics = len(topics)

    def __len__(self):
        return len(self.passages)

    def __getitem__(self, index):
        return self.passages[index]


def collate(batch):
    """Flat ids and offsets, as nn.EmbeddingBag wants them."""
    ids, offsets, labels = [], [], []
    for passage, label in batch:
        offsets.append(len(ids))
        ids.extend(bucket_ids(passage))
        labels.append(label)
    return torch.tensor(ids), torch.tensor(offsets), torch.tensor(labels)


class TopicClassifier(nn.Module):
    def __init__(self, num_topics, width=64):
        super().__init__()
        self.bag = nn.EmbeddingBag(BUCKETS, width, mode="mean")
        self.head = nn.Sequential(nn.Linear(width, 256), nn.ReLU(), nn.Linear(256, num_topics))

    def forward(self, ids, offsets):
        return self.head(self.bag(ids, offsets))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    random.seed(args.seed)
    torch.manual_seed(args.seed)
    data = Passages()
    loader = DataLoader(data, batch_size=args.batch, shuffle=True, drop_last=True, collate_fn=collate)
    model = TopicClassifier(data.num_topics)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, fused=True)

    step = 0
    while step < args.steps:
        for ids, offsets, labels in loader:
            if step == args.steps:
                break
            loss = F.cross_entropy(model(ids, offsets), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if step % 60 == 0:
                print(f"{step:5d} {loss.item():.4f}")
    print(f"final loss {loss.item():.6f}")


if __name__ == "__main__":
    main()
