# Regression on Friedman's first test function with a plain MLP.
import torch
from sklearn.datasets import make_friedman1
from torch import nn

torch.manual_seed(0)

BATCH = 1024
STEPS = 150

features, target = make_friedman1(n_samples=40000, n_features=16, noise=0.5, random_state=0)
features = torch.tensor(features, dtype=torch.float32) * 2 - 1
target = torch.tensor(target, dtype=torch.float32)
target = (target - target.mean()) / target.std()

model = nn.Sequential(
    nn.Linear(16, 384),
    nn.ReLU(),
    nn.Linear(384, 384),
    nn.ReLU(),
    nn.Linear(384, 384),
    nn.ReLU(),
    nn.Linear(384, 1),
    nn.Flatten(0),
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01, fused=True)
criterion = nn.MSELoss()

for step in range(1, STEPS + 1):
    rows = torch.randint(len(features), (BATCH,))
    loss = criterion(model(features[rows]), target[rows])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 50 == 0:
        print(f"step {step}: mse {loss.item():.4f}")

print(f"final loss {loss.item():.6f}")
