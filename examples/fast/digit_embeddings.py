"""Learn an embedding of the digits in which equal digits lie close together."""

import argparse

import torch
import torch.nn.functional as F
from contrastive_losses import supervised_contrastive_loss
from sklearn.datasets import load_digits
from torch import nn


class EmbeddingNet(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(64, 64, 3, padding=1),
            nn.ReLU(),
        )
        self.project = nn.Linear(64 * 4 * 4, dim)

    def forward(self, images):
        return F.normalize(self.project(self.features(images).flatten(1)), dim=1)


class Trainer:
    def __init__(self, model, images, labels, per_class, lr):
        self.model = model
        self.images = images
        self.labels = labels
        self.classes = [torch.nonzero(labels == label).flatten() for label in labels.unique()]
        self.per_class = per_class
        self.optimizer = torch.optim.Adam(model.parameters(), lr=lr, fused=True)

    def step(self):
        rows = torch.cat([members[torch.randperm(len(members))[: self.per_class]] for members in self.classes])
        embeddings = self.model(self.images[rows])
        loss = supervised_contrastive_loss(embeddings, self.labels[rows])
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.detach()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--per-class", type=int, default=10)
    parser.add_argument("--lr", type=float, default=1e-4)
    args = parser.parse_args()

    torch.manual_seed(1)
    digits = load_digits()
    images = torch.tensor(digits.images / 16.0, dtype=torch.float32).unsqueeze(1)
    labels = torch.tensor(digits.target)
    trainer = Trainer(EmbeddingNet(), images, labels, per_class=args.per_class, lr=args.lr)
    for step in range(1, args.steps + 1):
        loss = trainer.step()
        if step % 50 == 0:
            print(f"[{step}/{args.steps}] contrastive loss {loss.item():.4f}")
    print(f"final loss {loss.item():.6f}")


if __name__ == "__main__":
    main()
