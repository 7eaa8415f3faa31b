"""Learn the dynamics of a chain of masses and springs from whole trajectories."""

import torch
from torch import nn

MASSES = 16
HORIZON = 160
BATCH = 64
STEPS = 120
DT = 0.05


def simulate(start, horizon):
    """Symplectic Euler for a chain with fixed ends and slightly hardening springs."""
    position, velocity = start.chunk(2, dim=-1)
    states = [start]
    for _ in range(horizon):
        padded = nn.functional.pad(position, (1, 1))
        stretch = padded.diff(dim=-1)
        tension = stretch + 0.2 * stretch**3
        velocity = velocity + DT * tension.diff(dim=-1)
        position = position + DT * velocity
        states.append(torch.cat([position, velocity], dim=-1))
    return torch.stack(states, dim=1)


class ChainModel(nn.Module):
    def __init__(self, hidden=64):
        super().__init__()
        self.acceleration = nn.Sequential(nn.Linear(2 * MASSES, hidden), nn.Tanh(), nn.Linear(hidden, 2 * MASSES))

    def forward(self, start, horizon):
        trajectory = start.unsqueeze(1)
        for _ in range(horizon):
            state = trajectory[:, -1]
            state = state + DT * self.acceleration(state)
            trajectory = torch.cat([trajectory, state.unsqueeze(1)], dim=1)
        return trajectory


def main():
    torch.manual_seed(0)
    starts = torch.randn(2048, 2 * MASSES)
    truth = simulate(starts, HORIZON)
    model = ChainModel()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, fused=True)
    for step in range(1, STEPS + 1):
        rows = torch.randint(len(truth), (BATCH,))
        target = truth[rows]
        loss = (model(target[:, 0], HORIZON) - target).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            print(f"step {step}: {loss.item():.5f}")
    print(f"final loss {loss.item():.6f}")


if __name__ == "__main__":
    main()
