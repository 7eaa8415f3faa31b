"""A small convolutional network on handwritten digits, with the running accuracy of its classes."""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

BATCH = 256
STEPS = 300


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(1, 8, 3, padding=1)
        self.second = nn.Conv2d(8, 16, 3, padding=1)
        self.last = nn.Linear(16 * 4 * 4, 10)

    def forward(self, x):
        x = F.relu(self.first(x))
        x = F.max_pool2d(F.relu(self.second(x)), 2)
        return self.last(x.flatten(1))


class Accuracy:
    """How often each class was seen, how often it was recognised or among the best three, and how surely."""

    def __init__(self, classes):
        self.seen = torch.zeros(classes, dtype=torch.long)
        self.hits = torch.zeros(classes, dtype=torch.long)
        self.near = torch.zeros((), dtype=torch.long)
        self.sureness = torch.zeros(())

    def update(self, logits, labels):
        right = labels[logits.argmax(dim=1) == labels]
        self.seen += torch.bincount(labels, minlength=len(self.seen))
        self.hits += torch.bincount(right, minlength=len(self.hits))
        self.near += (logits.topk(3, dim=1).indices == labels[:, None]).sum()
        self.sureness += logits.softmax(dim=1).amax(dim=1).sum()

    def report(self):
        total = self.seen.sum()
        return f"{self.mean():.4f} of each class, {self.near / total:.4f} near, {self.sureness / total:.4f} sure"

    def mean(self):
        return (self.hits / self.seen.clamp(min=1)).mean().item()


def main():
    torch.manual_seed(0)
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(data.target)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, fused=True)
    accuracy = Accuracy(10)
    for step in range(1, STEPS + 1):
        rows = torch.randint(len(images), (BATCH,))
        logits = model(images[rows])
        loss = F.cross_entropy(logits, labels[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        accuracy.update(logits.detach(), labels[rows])
        if step % 100 == 0:
            print(f"step {step:4d}  loss {loss.item():.5f}  {accuracy.report()}")
    print(f"final loss {loss.item():.6f}")


if __name__ == "__main__":
    main()
