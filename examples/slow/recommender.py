"""Two-tower recommender on generated clicks, with sampled-softmax training.

Every user has a taste, every item a flavour; a click is drawn where both agree.
"""

import torch
import torch.nn.functional as F
from torch import nn

NUM_USERS = 4000
NUM_ITEMS = 1500
BATCH = 512
NEGATIVES = 63
STEPS = 150


def draw_clicks(clicks_per_user=20, tastes=6):
    user_taste = torch.randn(NUM_USERS, tastes)
    item_flavour = torch.randn(NUM_ITEMS, tastes)
    preference = torch.softmax(1.5 * user_taste @ item_flavour.T, dim=1)
    items = torch.multinomial(preference, clicks_per_user)
    users = torch.arange(NUM_USERS).repeat_interleave(clicks_per_user)
    return users, items.flatten()


class TwoTower(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.user = nn.Embedding(NUM_USERS, width)
        self.item = nn.Embedding(NUM_ITEMS, width)
        self.user_tower = nn.Sequential(nn.Linear(width, 64), nn.ReLU(), nn.Linear(64, width))
        self.item_tower = nn.Sequential(nn.Linear(width, 64), nn.ReLU(), nn.Linear(64, width))

    def forward(self, users, candidates):
        u = self.user_tower(self.user(users))
        v = F.embedding(candidates, self.item_tower(self.item.weight))
        return torch.einsum("bd,bcd->bc", u, v)


def hit_rate(scores, k=10):
    """Share of the rows whose first candidate, the clicked item, ranks among the first k."""
    hits = 0
    for row in scores:
        rank = (row > row[0]).sum().item()
        if rank < k:
            hits += 1
    return hits / len(scores)


def main():
    torch.manual_seed(0)
    users, items = draw_clicks()
    model = TwoTower()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3, fused=True)
    running = 0.0
    for step in range(1, STEPS + 1):
        rows = torch.randint(len(users), (BATCH,))
        negatives = torch.randint(NUM_ITEMS, (BATCH, NEGATIVES))
        candidates = torch.cat([items[rows, None], negatives], dim=1)
        scores = model(users[rows], candidates)
        loss = F.cross_entropy(scores, torch.zeros(BATCH, dtype=torch.long))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        running = 0.9 * running + 0.1 * hit_rate(scores.detach())
        if step % 50 == 0:
            print(f"step {step}: loss {loss.item():.4f}, hit@10 {running:.3f}")
    print(f"final loss {loss.item():.6f}")


if __name__ == "__main__":
    main()
