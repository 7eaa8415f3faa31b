# fastText-style topic classifier: hashed word n-grams -> mean of bucket vectors -> linear layer
import pydoc_data.topics
import zlib

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)

config = dict(buckets=2**18, dim=32, ngram=3, chunk=60, stride=12, batch=64, steps=400, lr=0.2, n_topics=20)


def bucket_ids(words, n, buckets):
    ids = []
    for k in range(1, n + 1):
        for i in range(len(words) - k + 1):
            ids.append(zlib.crc32(" ".join(words[i : i + k]).encode()) % buckets)
    return ids


def make_data(cfg):
    topics = sorted(pydoc_data.topics.topics.items(), key=lambda kv: -len(kv[1]))[: cfg["n_topics"]]
    rows, labels = [], []
    for label, (_, text) in enumerate(topics):
        words = text.lower().split()[:3000]
        for s in range(0, len(words) - cfg["chunk"], cfg["stride"]):
            rows.append(bucket_ids(words[s : s + cfg["chunk"]], cfg["ngram"], cfg["buckets"]))
            labels.append(label)
    return torch.tensor(rows), torch.tensor(labels)


class HashedBag(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.table = nn.EmbeddingBag(cfg["buckets"], cfg["dim"], mode="mean", sparse=True)
        nn.init.uniform_(self.table.weight, -1 / cfg["dim"], 1 / cfg["dim"])
        self.fc = nn.Linear(cfg["dim"], cfg["n_topics"])

    def forward(self, ids):
        return self.fc(self.table(ids))


rows, labels = make_data(config)
perm = torch.randperm(len(rows))
n_val = len(rows) // 10
val, train = perm[:n_val], perm[n_val:]
print(f"{len(train)} training chunks of {rows.shape[1]} n-grams, {len(val)} held out")

net = HashedBag(config)
optimizer = torch.optim.Adagrad(net.parameters(), lr=config["lr"])


@torch.no_grad()
def validate():
    logits = net(rows[val])
    return F.cross_entropy(logits, labels[val]).item(), (logits.argmax(1) == labels[val]).float().mean().item()


for step in range(1, config["steps"] + 1):
    pick = train[torch.randint(len(train), (config["batch"],))]
    loss = F.cross_entropy(net(rows[pick]), labels[pick])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 100 == 0:
        vl, va = validate()
        print(f"step {step:4d}  train {loss.item():.4f}  val {vl:.4f}  acc {va:.3f}")
print(f"final loss {loss.item():.5f}")
