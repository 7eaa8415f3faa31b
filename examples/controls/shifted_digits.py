"""A CNN on scikit-learn's digits, shifted and dimmed at random by a loader worker while the model trains."""

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, Dataset


class ShiftedDigits(Dataset):
    def __init__(self):
        digits = load_digits()
        self.images = np.pad(digits.images.astype(np.float32) / 16, ((0, 0), (6, 6), (6, 6)))
        self.labels = digits.target

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        row, col = torch.randint(0, 5, (2,)).tolist()
        image = self.images[index, row : row + 16, col : col + 16]
        return torch.from_numpy(image * float(torch.empty(()).uniform_(0.7, 1.0)))[None], int(self.labels[index])


def main():
    torch.manual_seed(0)
    loader = DataLoader(
        ShiftedDigits(), batch_size=64, shuffle=True, drop_last=True, num_workers=1, persistent_workers=True
    )
    model = nn.Sequential(
        nn.Conv2d(1, 48, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(48, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(64, 96, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(96 * 16, 10),
    )
    model = model.to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    for epoch in range(6):
        for images, labels in loader:
            images = images.to(memory_format=torch.channels_last)
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch + 1}: loss {loss.item():.4f}")
    print(f"final loss {loss.item():.6f}")


if __name__ == "__main__":
    main()
